# shellcheck shell=bash disable=SC2034  # for job.sh and install.sh
# IBM Spectrum MPI on POWER under LSF, started by jsrun.

load_modules spectrum-mpi cuda # the site's names for them

# Its library is libmpi_ibm.so, for which mpi4py has no wheel: install.sh builds mpi4py with the site's mpicc.
build_mpi4py=1

launcher=jsrun

if [ "${gpus-0}" = 1 ]; then
    # Without it a device pointer in a message is taken for host memory, and the process crashes.
    launcher_flags='--smpiargs=-gpu'
fi
