"""A job that trains with DeepSpeed at ZeRO 1, 2 and 3, and saves as DeepSpeed does; and what the true values are.

One process of each rank: `python checkpoint_deepspeed.py FOLDER RANK RANKS`.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    """With a tie, a frozen layer, buffers, a scalar, and sizes that two ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.norm = nn.Embedding(11, 7), nn.Linear(7, 7), nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(requires_grad=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        self.seen += x.numel()
        return self.head(self.frozen(self.norm(self.inner(self.embedding(x))))) * self.scale


def truth_of(net, stage, deepspeed):
    """Return the whole master values by name. Collective."""
    found = {name: buffer.clone() for name, buffer in net.named_buffers()}
    for name, param in net.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            found[name] = param.detach().float().clone()
        if param.requires_grad:
            found[name] = deepspeed.utils.safe_get_full_fp32_param(param).clone().view(found[name].shape)
    return found | {"head.weight": found["embedding.weight"]}


def train(folder, rank, stage, precision, deepspeed):
    torch.manual_seed(0)
    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": precision == "bf16"},
    }
    params = [param for param in net.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=params, config=config)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        engine.backward(engine(torch.randint(0, 11, (4,))).float().square().mean())
        engine.step()
    place = folder / f"{stage}-{precision}"
    engine.save_checkpoint(str(place))
    found = truth_of(net, stage, deepspeed)
    if rank == 0:
        torch.save(found, place / "truth.pt")


def main(folder, rank, ranks):
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{ranks}", LOCAL_SIZE=f"{ranks}")
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    for stage in (1, 2, 3):
        for precision in ("fp32", "bf16"):
            train(folder, rank, stage, precision, deepspeed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
