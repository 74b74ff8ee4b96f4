"""What the examples train: a small network on made-up data, and the same training in one process to compare with."""

import torch
from torch import distributed as dist
from torch import nn

STEPS, BATCH, WIDTH = 5, 16, 32


def network() -> nn.Sequential:
    """Return the network, with the same parameters on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4), nn.Tanh())


def data(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one of `parts` equal parts of a step's inputs (BATCH / parts, 8) and targets (BATCH / parts, 4)."""
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return inputs.chunk(parts)[part], inputs[:, :4].sin().chunk(parts)[part]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all examples."""
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> list[float]:
    """Train on (inputs, targets); return the loss of each step."""
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(steps: int = STEPS) -> list[float]:
    """Return the losses of one process that has all data."""
    model = network()
    return train(model, adam(model), [data(step) for step in range(steps)])


def mean(losses: list[float]) -> list[float]:
    """Return the mean over ranks of each loss."""
    means = torch.tensor(losses)
    dist.all_reduce(means, dist.ReduceOp.AVG)
    return means.tolist()


def report(what: str, losses: list[float], expected: list[float], tolerance: float = 1e-5) -> None:
    """Check losses against those of one process, and print a line from rank 0."""
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    if apart > tolerance:
        message = f"{what}: losses {losses} are not those of one process, {expected}"
        raise AssertionError(message)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{what}, {ranks} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}, one process within {tolerance:g}")
