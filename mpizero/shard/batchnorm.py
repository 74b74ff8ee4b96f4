"""Batch normalisation over the batches of all ranks.

[Note: batches of all ranks] torch's own SyncBatchNorm, without torch.distributed, takes the statistics of its rank's
batch in silence. Here each rank computes count, mean and sum of squared deviations of its own batch by torch's kernel
(on the CPU two passes, sums in fp64 for fp32 data; on a GPU Welford's in fp32), all ranks get all of these rows in
fp64, and each merges them in the canonical order by the formula of Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", 1979. What is squared are differences of means, never the data, and
all ranks have the same bits. Backward needs two sums over all elements for each channel, which ranks add up in fp64, in
the canonical order too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from mpizero.collectives import all_gather, all_reduce, pairwise
from mpizero.collectives.call import default_communicator
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LEAST_DIMS = 2

Row = tuple[float, Tensor, Tensor]
"""Elements per channel, their means and their sums of squared deviations; the tensors fp64, of shape (channels,)."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Hold what is known of the joined batch; tensors are fp32 (fp64 for fp64 data), of shape (channels,)."""

    count: int
    mean: Tensor
    var: Tensor
    """Biased: what normalises."""
    unbiased: Tensor
    eps: float
    comm: Any


class SyncBatchNorm(_BatchNorm):
    """Normalise by the mean and the variance of the joined batch of all ranks.

    Takes input of shape (n, channels, ...), n unevenly large over ranks and 0 on some perhaps. Results, gradients and
    running statistics are those of torch's BatchNorm in one process on the joined batch, to rounding; what comes from
    the other ranks has the same bits everywhere. Reduced precisions compute their statistics in fp32. Where running
    statistics normalise (eval mode), nothing is sent.

    Collective in forward, wherever the batch's own statistics are used (with `track_running_stats=False` in eval mode
    too): an all-gather of 8 (2 channels + 1) bytes per rank; and in backward: an all-reduce of 16 bytes per channel. On
    a GPU the counts, which the host knows, are gathered apart, 8 bytes per rank, and no value is read from the device.
    Every rank must run the module equally often and take its output into the loss, also that of an empty batch.

    These calls are made on `comm` itself, not on the duplicate that models talk over: backward may find that one in
    the middle of a model's own traffic. They wait for what the program has under way on `comm` (`async_op=True`), and
    no other thread may use `comm` meanwhile; pass `mpizero.Communicator(...)` of its own where one does.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        *,
        affine: bool = True,
        track_running_stats: bool = True,
        comm: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the module as torch's BatchNorm is made.

        Args:
            num_features: the number of channels.
            eps: added to the variance.
            momentum: the weight of the new value in running statistics; None takes the mean over all batches.
            affine: whether to scale and shift by parameters.
            track_running_stats: whether to keep running statistics, for eval mode.
            comm: the ranks whose batches are joined; None means `mpizero.world()`, asked for at the first forward.
            device: where parameters and buffers are made.
            dtype: their dtype.
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Return the normalised input, of its shape and dtype.

        Args:
            input: shape (n, channels, ...).

        Raises:
            ArgumentError: for another shape; on all ranks, if the joined batch has one element per channel.

        Collective, unless running statistics normalise.
        """
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return _apply(input, (self.running_mean, self.running_var), self.weight, self.bias, self.eps)
        batch = _joined_statistics(input.detach(), self.eps, default_communicator(self.comm))
        if self.training and self.track_running_stats and batch.count:
            self._track(batch)
        return _Normalise.apply(input, self.weight, self.bias, batch)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < LEAST_DIMS or input.size(1) != self.num_features:
            rule = f"(n, {self.num_features}, ...)"
            raise ArgumentError(must_be("shape of SyncBatchNorm's input", rule, tuple(input.shape)))

    @torch.no_grad()
    def _track(self, batch: _Batch) -> None:
        """Update the running statistics as torch does."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked or 1)
        self.running_mean.mul_(1 - share).add_(batch.mean, alpha=share)
        self.running_var.mul_(1 - share).add_(batch.unbiased, alpha=share)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copy the module; the copy talks over the same communicator."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.comm)] = self.comm
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


def convert_sync_batchnorm(module: nn.Module, comm: Any = None) -> nn.Module:
    """Put a `SyncBatchNorm` in the place of every BatchNorm in a module, before it is sharded.

    Parameters, buffers, hooks, the training flag and all names stay; optimizers that hold the parameters stay valid.

    Args:
        module: a model, changed in place, or a single BatchNorm. `torch.nn.SyncBatchNorm` counts as one.
        comm: the ranks whose batches are joined; None means `mpizero.world()`.

    Returns:
        `module`, or, for a single BatchNorm, what takes its place.

    Raises:
        ArgumentError: for a model that is sharded already, or a lazy BatchNorm that has not seen its input yet.
        ArgumentTypeError: for a subclass of BatchNorm, whose own ways would be lost; names it.

    Sends nothing. See `SyncBatchNorm` for what a forward and a backward send.
    """
    if any(hasattr(param, "_mpizero_owner") for param in module.parameters()):
        remedy = "call convert_sync_batchnorm before mpizero.shard"
        raise ArgumentError(must_be("module", "one that is not sharded yet", type(module).__name__, remedy))
    for name, inner in module.named_modules():
        _check_convertible(name, inner)
    made = {inner: _synchronised(inner, comm) for inner in module.modules() if type(inner) in CONVERTED}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():  # noqa: SLF001  (named_children leaves out a child's second name)
            if child in made:
                parent._modules[name] = made[child]  # noqa: SLF001
    return made.get(module, module)


def _check_convertible(name: str, module: nn.Module) -> None:
    if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
        return
    got = f"{type(module).__name__} at {name or 'the root'}"
    if isinstance(module, LazyModuleMixin):
        raise ArgumentError(must_be("BatchNorm", "initialised", got, "run a forward first"))
    if type(module) not in CONVERTED:
        known = ", ".join(cls.__name__ for cls in CONVERTED)
        raise ArgumentTypeError(must_be("BatchNorm", f"one of torch's own {known}", got, "replace it yourself"))


def _synchronised(module: nn.Module, comm: Any) -> SyncBatchNorm:
    """Return a SyncBatchNorm that has everything of `module`."""
    made = SyncBatchNorm.__new__(SyncBatchNorm)
    made.__dict__ = dict(module.__dict__)
    made.comm = comm
    return made


def _joined_statistics(x: Tensor, eps: float, comm: Any) -> _Batch:
    """Return the statistics of the joined batch. Collective."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels = x.size(1)
    table = all_gather(_own_row(x, dtype), comm)
    counts = all_gather(np.array([_count(x)], np.float64), comm) if x.is_cuda else table[:, 0]
    count, mean, deviations = pairwise(_unpacked(table, counts.tolist()), _merged)
    if count == 1:
        rule = "more than 1 element per channel in training"
        raise ArgumentError(must_be("joined batch of SyncBatchNorm", rule, f"{channels} channels, 1 element each"))
    return _Batch(
        count=int(count),
        mean=mean.to(dtype),
        var=(deviations / max(count, 1)).to(dtype),
        unbiased=(deviations / max(count - 1, 1)).to(dtype),
        eps=eps,
        comm=comm,
    )


def _own_row(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [count, means, sums of squared deviations] of this rank's batch, fp64, shape (1, 1 + 2 channels)."""
    channels = x.size(1)
    row = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device=x.device)
    count = _count(x)
    if count:
        # Running statistics decide the dtype of the result; with momentum 0 they are given for that alone.
        like = torch.zeros(2, channels, dtype=dtype, device=x.device)
        mean, var = torch.batch_norm_update_stats(x, like[0], like[1], 0.0)
        row[0, 0] = count
        row[0, 1 : 1 + channels] = mean
        row[0, 1 + channels :] = var.double() * count
    return row


def _count(x: Tensor) -> int:
    """Return the elements per channel."""
    return x.numel() // max(x.size(1), 1)


def _unpacked(table: Tensor, counts: list[float]) -> list[Row]:
    channels = table.size(1) // 2
    return [(count, row[1 : 1 + channels], row[1 + channels :]) for count, row in zip(counts, table, strict=True)]


def _merged(left: Row, right: Row) -> Row:
    """Return the row of two batches joined; see [Note: batches of all ranks]."""
    count = left[0] + right[0]
    if not count:
        return left
    delta = right[1] - left[1]
    mean = left[1] + delta * (right[0] / count)
    return count, mean, left[2] + right[2] + delta.square() * (left[0] * right[0] / count)


class _Normalise(torch.autograd.Function):
    """Normalise by given statistics, with the gradient of normalising by the joined batch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: _Batch) -> Tensor:
        """Return the normalised input."""
        ctx.save_for_backward(x, weight)
        ctx.batch, ctx.has_bias = batch, bias is not None
        return _apply(x, (batch.mean, batch.var), weight, bias, batch.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of input, weight and bias: the latter two of this rank's batch alone. Collective."""
        x, weight = ctx.saved_tensors
        batch = ctx.batch
        sums = _sums(x, grad, batch)
        joined = all_reduce(sums, batch.comm, out=torch.empty_like(sums), order="canonical")
        of_weight = sums[1].to(weight.dtype) if weight is not None else None
        of_bias = sums[0].to(grad.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return _input_gradient(x, grad, weight, batch, joined), of_weight, of_bias, None


def _sums(x: Tensor, grad: Tensor, batch: _Batch) -> Tensor:
    """Return, for each channel, this rank's sums of gradients and of gradients times normalised input; fp64, (2, c)."""
    sums = torch.zeros(2, batch.mean.numel(), dtype=torch.float64, device=x.device)
    if x.numel():
        ones = torch.ones_like(batch.mean)
        given = (batch.mean, batch.var, None, None)
        # With given statistics, torch's kernel makes both sums in one pass: they are the gradients of scale and shift.
        _, sums[1], sums[0] = torch.ops.aten.native_batch_norm_backward(
            grad.contiguous(), x, ones, *given, train=False, eps=batch.eps, output_mask=[False, True, True]
        )
    return sums


def _input_gradient(x: Tensor, grad: Tensor, weight: Tensor | None, batch: _Batch, joined: Tensor) -> Tensor:
    """Return the gradient of the input, of its dtype.

    With inverse = 1 / (standard deviation) it is weight * inverse * (grad - mean of grad - normalised x * mean of grad
    times normalised x), the means being over the joined batch.
    """
    means = joined / max(batch.count, 1)
    inverse = (batch.var.double() + batch.eps).rsqrt()
    scale = inverse if weight is None else inverse * weight
    of_grad, of_x, constant = (
        value.to(batch.mean.dtype).view(-1, *[1] * (x.dim() - 2))
        for value in (scale, -scale * inverse * means[1], -scale * means[0])
    )
    centred = x - batch.mean.view_as(of_grad)
    return torch.addcmul(constant, centred, of_x).addcmul_(grad.to(centred.dtype), of_grad).to(x.dtype)


def _apply(
    x: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise by given mean and variance, in whose dtype torch's kernels want weight and bias."""
    if not x.numel():  # torch's CPU kernel divides by zero in the backward of an empty batch
        return x.clone()
    dtype = statistics[0].dtype
    return nn.functional.batch_norm(x, *statistics, _cast(weight, dtype), _cast(bias, dtype), eps=eps)


def _cast(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype)
