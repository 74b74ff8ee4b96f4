# shellcheck shell=bash disable=SC2034  # for job.sh and install.sh
# Any Slurm cluster, with the MPICH that comes from PyPI. For a site's own MPICH, empty `extras` and name its module.

extras=mpich # the MPI is installed beside mpizero

# MPICH speaks PMI-1 and PMI-2, and every Slurm has the plugin. With --mpi=none each rank would be alone, of size 1.
launcher='srun --mpi=pmi2'
