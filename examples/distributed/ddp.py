"""Train with torch's DDP, its gradients sent as bf16.

mpirun -n 4 python examples/distributed/ddp.py
"""

from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from toy import STEPS, adam, alone, data, mean, network, report, train

import mpizero.c10d


def in_bf16(state, bucket):
    """Send a bucket as bf16: DDP takes torch's own hook, by its name, for NCCL alone."""
    return bf16_compress_hook(state, bucket)


mpizero.c10d.init()
rank, size = dist.get_rank(), dist.get_world_size()

model = DistributedDataParallel(network())
model.register_comm_hook(None, in_bf16)

losses = train(model, adam(model), [data(step, rank, size) for step in range(STEPS)])
report("DDP with bf16 gradients", mean(losses), alone(), tolerance=1e-2)
dist.destroy_process_group()
