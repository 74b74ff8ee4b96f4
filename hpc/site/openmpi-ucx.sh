# shellcheck shell=bash disable=SC2034  # for job.sh and install.sh
# Open MPI built by the site, over UCX and InfiniBand (or RoCE). The PMIx of Slurm and Open MPI have to match.

# The site's name for it; a module of CUDA belongs here where Open MPI's does not load it.
# shellcheck disable=SC2086  # words
load_modules ${modules:-openmpi}

# Open MPI 5 knows PMIx alone. Where `srun --mpi=list` shows no pmix: launcher=mpirun.
launcher='srun --mpi=pmix'

# UCX is what Open MPI picks by itself; asked for by name, a job without it fails, where it would crawl over TCP.
export OMPI_MCA_pml=ucx

# UCX finds the transports of a node itself. A list that lacks CUDA has it take GPU memory for host memory and crash.
unset UCX_TLS

# With a card near each GPU every rank uses its own: bind.sh sets UCX_NET_DEVICES where a node has several cards. Left
# alone, UCX splits large messages over two cards, which ranks then share.
export MPIZERO_BIND_CARD=ucx

# InfiniBand pins the memory that it sends from; some sites' soft limit is too low for buffers of a model's size.
ulimit -l "$(ulimit -H -l)"

if [ "${gpus-0}" = 1 ]; then
    # Some builds (conda's) have CUDA support compiled in and switched off.
    export OMPI_MCA_opal_cuda_support=true
fi
