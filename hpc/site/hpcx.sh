# shellcheck shell=bash disable=SC2034  # for job.sh and install.sh
# NVIDIA HPC-X: Open MPI over UCX, and so the same settings, with collectives of its own beside.

modules=hpcx # or, in place of a module: what the hpcx_load of its hpcx-init.sh sets

# shellcheck source=hpc/site/openmpi-ucx.sh
. "${hpc:?}/site/openmpi-ucx.sh"

# mpizero has its own collectives and uses the library's for small ones: HCOLL would be set up on each communicator.
export OMPI_MCA_coll_hcoll_enable=0
