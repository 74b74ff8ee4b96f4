"""Small models whose parameters have every shape and role that has ever gone wrong in sharding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

__all__ = ["LENGTH", "VOCABULARY", "AwkwardModel", "Block", "awkward_model", "token_loss", "tokens"]

VOCABULARY = 61
LENGTH = 11
"""Tokens of a sequence."""
WIDTH = 24
HEADS = 3
HIDDEN = 101


class Block(nn.Module):
    """Be a transformer block with a scalar gain and a frozen matrix beside the trained ones.

    Keys have no bias: the softmax takes no notice of one, so that its true gradient is zero, and an optimizer that
    divides by the gradient's size would move it by rounding noise alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        """Return x, shape (batch, length, WIDTH), after attention and a two-layer network."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.gain * self.frozen(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class AwkwardModel(nn.Module):
    """Predict the next token with a head tied to the embedding.

    Beside the blocks: parameters of shape (1,) and (0,), one that no forward uses, and a buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.head.weight = self.embedding.weight
        self.shift = nn.Parameter(torch.full((1,), 0.1))
        self.nothing = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, VOCABULARY) for tokens of shape (batch, length)."""
        x = self.embedding(tokens) * self.scale.to(self.position.dtype) + self.position
        for block in self.blocks:
            x = block(x)
        # Behind the last norm: a shift of all features before one has no effect, and so no gradient.
        return self.head(self.norm(x) + self.shift) + self.nothing.sum()


def awkward_model(seed: int) -> AwkwardModel:
    """Return a model whose first values come from `seed` alone; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AwkwardModel()


def tokens(seed: int, step: int, count: int) -> Tensor:
    """Return `count` sequences of LENGTH + 1 tokens, int64, the same on every machine for the same (seed, step)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)


def token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy, fp32, of predicting each of the batch's tokens from those before it."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
