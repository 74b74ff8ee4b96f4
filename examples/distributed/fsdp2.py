"""Train with torch's FSDP2: parameters, gradients and optimizer states are sharded over all ranks.

mpirun -n 4 python examples/distributed/fsdp2.py
"""

from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import STEPS, adam, alone, data, mean, network, report, train

import mpizero.c10d

mpizero.c10d.init()
rank, size = dist.get_rank(), dist.get_world_size()

mesh = init_device_mesh("cpu", (size,))
model = network()
for layer in model[::2]:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

losses = train(model, adam(model), [data(step, rank, size) for step in range(STEPS)])
report("FSDP2", mean(losses), alone())
dist.destroy_process_group()
