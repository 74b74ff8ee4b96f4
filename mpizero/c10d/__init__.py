"""torch.distributed on any MPI: the backend `"mpizero"`, on mpizero's communicators and verbs.

    import mpizero.c10d

    mpizero.c10d.init()               # under mpirun or srun: no MASTER_ADDR, no port
    dist.all_reduce(x)                # and everything that is written for torch.distributed

Importing this module registers the backend, for CPU and CUDA tensors, and the rendezvous `mpi://`, and does nothing
else: MPI starts with the first group. `dist.init_process_group("mpizero", init_method="mpi://")` is what `init` does;
`dist.init_process_group("mpizero")` takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, as every
backend does, and the ranks must still be ranks of one MPI job.
"""

from mpizero.c10d.group import ProcessGroup
from mpizero.c10d.start import init, register

__all__ = ["ProcessGroup", "init"]

register()
