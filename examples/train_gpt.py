"""Train a byte-level GPT on text, on any number of ranks: `mpirun -n 4 python examples/train_gpt.py --stage 3`.

This is the one-process script plus the two lines marked `<- sharded`; `python examples/train_gpt.py` runs it alone.
With `--save DIR` it saves, on SIGUSR1 too; with `--resume` or `mzrun --restarts` it goes on, on any number of ranks."""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (as in torch's own examples)
from torch import nn

import mpizero as mz
from mpizero.bench import Progress, Text


class Block(nn.Module):
    """Attend to the bytes before, then transform each position."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, dim) to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predict the next byte."""

    def __init__(self, dim: int = 192, heads: int = 6, layers: int = 4, length: int = 128, vocab: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of `targets`, both of shape (batch, length)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def sequences(text: Text, numbers: torch.Tensor) -> list[torch.Tensor]:
    """Return inputs and targets, both (len(numbers), length): the same for a number whichever rank asks."""
    return [torch.cat(parts) for parts in zip(*(text.batch(1, seed=(int(n),)) for n in numbers), strict=True)]


@torch.no_grad()
def evaluate(model: nn.Module, text: Text, batch: int) -> float:
    """Return the mean loss over all ranks, each on its own batches."""
    model.eval()
    losses = [model(*text.batch(batch, seed=(mz.world().rank, number))) for number in range(4)]
    model.train()
    return mz.all_reduce(torch.stack(losses).mean().float(), op="mean").item()


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stage", type=int, default=3, help="0 replicates, 3 shards parameters, gradients and optimizer")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of parameters in use")
    add("--exact", type=int, default=0, help="micro-batches per step, for the same bits on 1, 2, 4, ... ranks")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to train; cuda is the rank's own GPU")
    add("--steps", type=int, default=80, help="number of optimizer steps")
    add("--batch", type=int, default=8, help="sequences per rank and step; a checkpoint knows its own total")
    add("--data", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a file, or a folder of files")
    add("--save", type=Path, help="a folder for checkpoints")
    add("--every", type=int, default=20, help="steps from one checkpoint to the next")
    add("--resume", action="store_true", default="MPIZERO_RESTART" in os.environ, help="go on from the latest one")
    return parser.parse_args()


def main() -> None:
    """Train, and say what it took."""
    args = options()
    device = f"cuda:{mz.choose_gpu()}" if args.device == "cuda" else "cpu"
    train, valid = Text.split(args.data, length=128, device=device)
    torch.manual_seed(0)
    model = GPT().to(device)
    precision = mz.Precision(param=torch.bfloat16 if args.precision == "bf16" else None)
    model = mz.shard(model, stage=args.stage, units={Block}, precision=precision, exact=args.exact > 0)  # <- sharded
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rank, size = mz.world().rank, mz.world().size
    at = {"step": 0, "batch": args.batch * size}
    if args.resume and args.save and (args.save / "latest").exists():
        at = mz.load(args.save, model, optimizer)  # <- saved
    first = evaluate(model, valid, args.batch)
    with Progress(model, optimizer, steps=args.steps - at["step"]) as progress:
        for step in range(at["step"] + 1, args.steps + 1):
            numbers = torch.arange((step - 1) * at["batch"], step * at["batch"])
            mine = mz.micro_batches(model, numbers, args.exact, step=step) if args.exact else [numbers[rank::size]]
            for part in mine:
                loss = model(*sequences(train, part))
                loss.backward()
            mz.clip_grad_norm_(model, 1.0)  # <- sharded
            optimizer.step()
            optimizer.zero_grad()
            progress.step(loss, tokens=at["batch"] * 128 // size)
            if args.save and ((stop := mz.stop_requested()) or step % args.every == 0):  # <- saved
                mz.save(args.save / f"step-{step}", model, optimizer, extra=at | {"step": step}, keep_last=2)
                if stop:
                    break
    progress.summary(first, evaluate(model, valid, args.batch))


if __name__ == "__main__":
    main()
