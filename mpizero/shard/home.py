"""Where a model lies: in host memory or on one GPU, and the stream in whose order its memory is taken and let go.

[Note: home stream] On a GPU, what `shard` does with memory of its own it does in the order of one stream per model:
the one that was current at `mpizero.shard`. torch's allocator gives a freed block out again at once, to whoever asks
next on the stream on which it was taken. So a block must be let go behind all work that touches it, in the order of
that stream, and this is how that holds:

1. A gather takes the memory of full parameters (`untyped_storage().resize_`) on the home stream, and the collective is
   called there: it waits for that stream, so whatever had the block before is through with it. `Work.wait` makes the
   home stream wait for the collective. Only behind that is the memory used, or let go: emptying a storage asks nobody
   who else refers to it, so a release waits for its gather first, also where nobody needed the parameters.
2. Gradients are copied from autograd's tensors into `incoming` on the home stream, which `Reductions` holds from the
   call of the collective until `Work.wait` has made the home stream wait for it. Nothing writes there meanwhile: what
   arrives late is collected apart.
3. Where the caller's stream is another (a forward under `torch.cuda.stream`, whose backward autograd runs on the same
   one), each is made to wait for the other around what is done here (`Home.order`): the home stream for what has been
   computed so far, the caller's for what was filled, let go or summed up.

Autograd runs the backward of a GPU in a thread of its own, with that thread's current stream: hooks ask for it anew
each time, and hold no lock of the caller's.

[Note: units in flight on a GPU] The host runs ahead of the device, but its memory does not: blocks are taken and let go
by the host in the order of one stream, and a block that was let go is taken again at once, by work queued behind its
last use. So what is allocated follows from the order of calls, whatever the device has come to: beside the root and
the units that forward or backward is inside of, at most `prefetch` gathered units (see `gathers`) and the gradients of
one unit more than are being reduced (see `reductions`). Nothing has to wait for the device for that. What bounds the
host is a wait for the other ranks: they cannot take what is not computed, so when the `Work.wait` of a
collective returns, all has been computed that it was made of.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpizero.arrays import device_of
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["Home", "home_of", "random_state", "set_random_state"]

_AS_IT_IS = nullcontext()


class Home:
    """Know a model's device, and order what is done with its memory; see [Note: home stream]."""

    def __init__(self, device: torch.device, *, alone: bool = False) -> None:
        """Take the device's current stream for the home stream.

        Args:
            device: where the model lies.
            alone: whether there is one rank, which needs no collectives.

        Raises:
            ArgumentTypeError: for several ranks on a GPU where CuPy is not installed.
        """
        here = torch.empty(0, device=device)
        self.device = here.device
        self.on_device = here.is_cuda if alone else device_of(here) is not None
        """Whether collectives find tensors in device memory, where no core of the host adds them up."""
        self._stream: Any = torch.cuda.current_stream(here.device) if here.is_cuda else None

    def order(self) -> AbstractContextManager[None]:
        """Do what is inside in the order of the home stream, behind the current one, which goes on behind it."""
        if self._stream is None:
            return _AS_IT_IS
        current = torch.cuda.current_stream(self.device)
        return _AS_IT_IS if current == self._stream else self._between(current)

    @contextmanager
    def _between(self, current: Any) -> Iterator[None]:
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


def home_of(params: Iterable[tuple[str, Tensor]], others: Iterable[Tensor], *, alone: bool = False) -> Home:
    """Return where a model lies, or is to lie: all on the meta device, it follows its other tensors or torch's default.

    Args:
        params: the parameters to be sharded, by name.
        others: its buffers and other tensors.
        alone: whether there is one rank.

    Raises:
        ArgumentTypeError: for parameters on devices of other kinds; lists them.
        ArgumentError: for parameters on more than one device; names one on each.
    """
    named = list(params)
    wrong = [f"{name} on {param.device}" for name, param in named if param.device.type not in {"cpu", "cuda", "meta"}]
    if wrong:
        rule = "in host memory, on one CUDA device, or on the meta device"
        remedy = "move the model before mpizero.shard: model.to('cuda') or model.to('cpu')"
        raise ArgumentTypeError(must_be("parameters", rule, ", ".join(wrong), remedy))
    found: dict[torch.device, str] = {}
    for name, param in named:
        if not param.is_meta:
            found.setdefault(param.device, name)
    if len(found) > 1:
        got = ", ".join(f"{name} on {device}" for device, name in found.items())
        target = next(device for device in found if device.type == "cuda")
        remedy = f"move the model before mpizero.shard, as with model.to({str(target)!r})"
        raise ArgumentError(must_be("parameters", "all on one device", got, remedy))
    return Home(next(iter(found)) if found else _wanted(others), alone=alone)


def _wanted(others: Iterable[Tensor]) -> torch.device:
    """Return the device for a model that has no values yet."""
    device = next((other.device for other in others if other.is_cuda), torch.get_default_device())
    return device if device.type == "cuda" else torch.device("cpu")


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of torch's generators of the host and, if it is a GPU, of a device. Asks the host alone."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
