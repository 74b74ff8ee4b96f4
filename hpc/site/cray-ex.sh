# shellcheck shell=bash disable=SC2034  # for job.sh and install.sh
# HPE Cray EX: Cray MPICH over Slingshot, started by srun or, under PBS, by the mpiexec of PALS.

# The variant with MPICH's binary interface: mpi4py's wheel loads libmpi.so.12, which the compilers' variants lack.
load_modules cray-python cray-mpich-abi

if command -v srun >/dev/null; then
    # Slurm's own PMI-2 is not what Cray MPICH asks for: with it each rank would be alone, or MPI would not start.
    launcher='srun --mpi=cray_shasta'
else
    launcher=mpiexec
fi

# Modules tell the compilers, not the loader, where the libraries lie that are opened at run time.
export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# Nodes have up to four cards. By default ranks are dealt out to them in blocks, whatever is near.
export MPICH_OFI_NIC_POLICY=NUMA

gtl=${CRAY_MPICH_ROOTDIR-}/gtl/lib/libmpi_gtl_cuda.so
if [ "${gpus-0}" = 1 ] && [ -e "$gtl" ]; then
    export MPICH_OFI_NIC_POLICY=GPU # the card near the rank's GPU
    export MPICH_GPU_SUPPORT_ENABLED=1
    # GPU support is a library of its own, linked into programs by Cray's compilers. Python is not: without it MPI ends
    # at its start with "GPU_SUPPORT_ENABLED is requested, but GTL library is not linked".
    export LD_PRELOAD=$gtl${LD_PRELOAD:+:$LD_PRELOAD}
else
    export MPICH_GPU_SUPPORT_ENABLED=0 # sites set it to 1 in a module, which fails without that library
fi

# Where large jobs hang, sites advise FI_MR_CACHE_MONITOR=disabled, at some cost in speed.
