"""Train a network in two stages, 1F1B, with DDP over the replicas of each stage.

mpirun -n 4 python examples/distributed/pipeline.py
"""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from toy import STEPS, adam, alone, data, network, report

import mpizero.c10d

STAGES, MICROBATCHES = 2, 4

mpizero.c10d.init()
replicas = dist.get_world_size() // STAGES
mesh = init_device_mesh("cpu", (replicas, STAGES), mesh_dim_names=("replica", "stage"))
replica, number = mesh.get_coordinate()

layers = network()
model = DistributedDataParallel(layers[:4] if number == 0 else layers[4:], process_group=mesh.get_group("replica"))
stage = PipelineStage(model, number, STAGES, torch.device("cpu"), group=mesh.get_group("stage"))
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
optimizer = adam(model)

losses = torch.zeros(STEPS)
for step in range(STEPS):
    inputs, targets = data(step, replica, replicas)
    optimizer.zero_grad()
    if number == 0:
        schedule.step(inputs)
    else:
        of_microbatches = []
        schedule.step(target=targets, losses=of_microbatches)
        losses[step] = torch.stack(of_microbatches).mean()
    optimizer.step()

dist.all_reduce(losses)  # the first stages have zeros
report("pipeline of two stages, 1F1B", (losses / replicas).tolist(), alone())
dist.destroy_process_group()
