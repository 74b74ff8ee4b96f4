# shellcheck shell=bash disable=SC2034  # for job.sh and install.sh
# Intel MPI, over InfiniBand, Omni-Path or Ethernet by libfabric.

load_modules intel-oneapi-mpi # the site's name for it

# Not mpirun, which is a shell script that a SIGUSR1 ends; this is what it starts.
launcher=mpiexec.hydra

# For srun instead: launcher='srun --mpi=pmi2', and I_MPI_PMI_LIBRARY set to the path of Slurm's libpmi2.so. A path that
# a module has set would have mpiexec's ranks ask Slurm, which did not start them.
unset I_MPI_PMI_LIBRARY

# bind.sh gives cores; Intel MPI's own pinning keeps ranks that share a core from the idle ones beside it.
export I_MPI_PIN=0

if [ "${gpus-0}" = 1 ]; then
    export I_MPI_OFFLOAD=1          # take pointers to GPU memory; off by default
    export I_MPI_OFFLOAD_MODE=cuda # of NVIDIA's GPUs
fi

# The provider is found by itself (mlx where there is InfiniBand). Nodes with several cards that are not all used:
# I_MPI_MULTIRAIL=1.
