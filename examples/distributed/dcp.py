"""Save a sharded model with torch.distributed.checkpoint, and go on from it with another number of ranks.

mpirun -n 4 python examples/distributed/dcp.py FOLDER    # a new folder: train and save
mpirun -n 2 python examples/distributed/dcp.py FOLDER    # load and train on
"""

import sys
from pathlib import Path

from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import STEPS, adam, alone, data, mean, network, report, train

import mpizero.c10d

folder = Path(sys.argv[1])
saved = (folder / ".metadata").exists()

mpizero.c10d.init()
rank, size = dist.get_rank(), dist.get_world_size()
model = fully_shard(network(), mesh=init_device_mesh("cpu", (size,)))
optimizer = adam(model)

if saved:
    weights, states = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": states}, checkpoint_id=folder)  # fills the tensors it is given
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

first = STEPS if saved else 0
losses = train(model, optimizer, [data(step, rank, size) for step in range(first, first + STEPS)])
report("loaded from DCP" if saved else "saved with DCP", mean(losses), alone(first + STEPS)[first:])

if not saved:
    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
dist.destroy_process_group()
