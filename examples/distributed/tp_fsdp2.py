"""Train with tensor parallelism in pairs of ranks, and FSDP2 over the pairs.

mpirun -n 4 python examples/distributed/tp_fsdp2.py
"""

from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import STEPS, adam, alone, data, mean, network, report, train

import mpizero.c10d

mpizero.c10d.init()
pairs = dist.get_world_size() // 2

mesh = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("data", "tensor"))
by = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
model = parallelize_module(network(), mesh["tensor"], by)
fully_shard(model, mesh=mesh["data"])

part = mesh["data"].get_local_rank()  # both ranks of a pair take the same data
losses = train(model, adam(model), [data(step, part, pairs) for step in range(STEPS)])
report("tensor parallelism x FSDP2", mean(losses), alone())
dist.destroy_process_group()
