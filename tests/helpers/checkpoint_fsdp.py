"""A job that shards a model by torch's own FSDP2, trains it, and saves it by torch.distributed.checkpoint.

One process of each rank: `python checkpoint_fsdp.py FOLDER RANK RANKS`.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpizero.testing.models import awkward_model, token_loss, tokens


def main(folder, rank, ranks):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = awkward_model(5)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        block.gain = torch.nn.Parameter(block.gain.detach().view(1))  # fully_shard takes no scalars
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.nothing})  # nor empty ones
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    token_loss(model, tokens(0, rank, 2)).backward()
    optimizer.step()
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save({**states, "step": 1}, checkpoint_id=folder / "dcp")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, folder / "truth.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
