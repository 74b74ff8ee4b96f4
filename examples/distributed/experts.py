"""Train a mixture of experts: one expert on each rank, to which all ranks send it what is its own.

    mpirun -n 4 python examples/distributed/experts.py

How many rows go from one rank to another is seen as they are routed: the ranks tell each other first.
"""

import torch
from torch import distributed as dist
from torch import nn
from toy import STEPS, adam, data, mean, report

import mpizero.c10d


class Mixture(nn.Module):
    """Choose an expert for each row, and weigh what it says by how sure the choice is."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor, apply) -> torch.Tensor:
        """Map (rows, 8) to (rows, 4); `apply(experts, rows, counts)` takes rows in the order of their experts."""
        sure, choice = self.router(x).softmax(1).max(1)
        order = choice.argsort(stable=True)
        rows = apply(self.experts, x[order], choice.bincount(minlength=len(self.experts)))
        return rows[order.argsort()] * sure[:, None]


def here(experts: nn.ModuleList, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Apply all experts in this process."""
    return torch.cat([expert(part) for expert, part in zip(experts, rows.split(counts.tolist()), strict=True)])


class Exchange(torch.autograd.Function):
    """Send `out[r]` rows to each rank r and take `back[r]` from it; gradients go the other way."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, out: list[int], back: list[int]) -> torch.Tensor:
        """Return what came, in the order of ranks."""
        ctx.counts = out, back
        came = rows.new_empty(sum(back), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), back, out)
        return came

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return each row's gradient to the rank that sent the row."""
        out, back = ctx.counts
        return Exchange.apply(gradient, back, out), None, None


def there(experts: nn.ModuleList, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Send each expert's rows to its rank, apply this rank's expert to what comes, send the results back."""
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    out, back = counts.tolist(), coming.tolist()
    done = experts[dist.get_rank()](Exchange.apply(rows, out, back))
    return Exchange.apply(done, back, out)


def average(model: Mixture) -> None:
    """Make gradients those of the mean loss: an expert has all ranks' sums already, the router its own rows' alone."""
    size = dist.get_world_size()
    for x in model.experts[dist.get_rank()].parameters():
        x.grad /= size
    for x in model.router.parameters():
        dist.all_reduce(x.grad, dist.ReduceOp.AVG)


def train(model: Mixture, apply, batches: list, finish=lambda _: None) -> list[float]:
    """Return the losses of the steps; `finish` gets the model between backward and step."""
    optimizer, losses = adam(model), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs, apply), targets)
        loss.backward()
        finish(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


mpizero.c10d.init()
rank, size = dist.get_rank(), dist.get_world_size()

losses = train(Mixture(size), there, [data(step, rank, size) for step in range(STEPS)], average)
report("an expert on each rank", mean(losses), train(Mixture(size), here, [data(step) for step in range(STEPS)]))
dist.destroy_process_group()
