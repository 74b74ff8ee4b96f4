"""Models built on the meta device: their values are made while they are sharded, one flat buffer after another.

[Note: values made twice] Each module initialises its own parameters and buffers (`reset_parameters`). The random
numbers of a real build come in the order in which modules were made, but memory for one unit at a time asks for the
order of the units, and a module's parameters may lie in several flat buffers. So rank 0 first runs all initialisers in
the model's order, one module in memory at a time: this makes the buffers, shows what nobody initialises, and tells the
state of the random numbers before each module. Any module can then be made again, alone, with the same values; its
parameters are made right where they belong. The price is that rank 0 initialises everything twice. Other ranks make
none: they get parameters and buffers as they always do. Values are made on the device where the model is to lie, by
that device's generator.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpizero.errors import ArgumentError, must_be
from mpizero.shard.agree import gather_texts
from mpizero.shard.home import random_state, set_random_state
from mpizero.shard.trees import own_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mpizero.shard.member import Member

__all__ = ["MetaModel"]


class MetaModel:
    """Make the values of what a model has on the meta device."""

    def __init__(self, model: nn.Module, materialize: Callable[[nn.Module], Any] | None, device: torch.device) -> None:
        """Find the modules with parameters, buffers or other tensors on the meta device.

        Args:
            model: the root.
            materialize: initialises a module's own parameters and buffers; None calls its `reset_parameters`.
            device: where values are made.
        """
        self._device = device
        self._make = _reset if materialize is None else materialize
        modules = [(name, module) for name, module in model.named_modules() if _has_meta(module)]
        self._named = modules
        self._forms = {id(module): _forms(module) for _, module in modules}
        """What each module's own parameters look like, which will be sharded by and by."""
        self._states: dict[int, tuple[Tensor, Tensor | None]] = {}
        """The state of the random numbers before each module."""

    def prepare(self, comm: Any, keep: Iterable[Tensor]) -> None:
        """Make all buffers and the parameters in `keep`, for good, and find out how to make the others. Collective.

        Only rank 0 gives them their values. Its generator is left as a real build would leave it.

        Args:
            comm: all ranks.
            keep: parameters that will not be sharded.

        Raises:
            ArgumentError: on all ranks, if anything is never initialised; lists what.
        """
        problems: list[str] = []
        made: dict[int, Tensor] = {}
        kept = {id(param) for param in keep}
        known: set[int] = set()
        for name, module in self._named:
            problems += self._prepare(module, f"{name}." if name else "", (made, kept, known), first=comm.rank == 0)
        if comm.size > 1:
            problems = "\n".join(filter(None, gather_texts(comm, "\n".join(problems)))).splitlines()
        if problems:
            what = "parameters and buffers on the meta device"
            remedy = "give their modules a reset_parameters method that does, or pass materialize="
            raise ArgumentError(must_be(what, "initialised by their modules", ", ".join(sorted(set(problems))), remedy))

    def fill(self, wanted: list[tuple[Member, Tensor]]) -> None:
        """Make parameters in place.

        Args:
            wanted: parameters, each with a tensor of its shape to hold the values: of its dtype, or copied to.
        """
        by_module: dict[int, tuple[nn.Module, dict[str, Tensor]]] = {}
        for member, target in wanted:
            module, attribute = member.places[0]
            by_module.setdefault(id(module), (module, {}))[1][attribute] = target
        for module, targets in by_module.values():
            own = dict(self._forms[id(module)])
            given = {name: targets[name] for name in targets if targets[name].dtype == own[name].dtype}
            forms = {name: given.get(name, form) for name, form in own.items()}
            with self._randomness_kept():
                set_random_state(self._device, self._states[id(module)])
                with _lent(module, forms, {}, self._device) as (params, _):
                    self._make(module)
            for name, target in targets.items():
                if params[name].data_ptr() != target.data_ptr():
                    target.copy_(params[name].detach())

    def _prepare(
        self, module: nn.Module, prefix: str, seen: tuple[dict[int, Tensor], set[int], set[int]], *, first: bool
    ) -> list[str]:
        """Initialise a module and keep what is to be kept; return what it has left as it was."""
        made, kept, known = seen
        problems: list[str] = []
        values: tuple[dict[str, Any], ...] = (dict(module._parameters), dict(module._buffers))  # noqa: SLF001
        hidden = _hidden(module)
        runs = first or hidden
        self._states[id(module)] = random_state(self._device)
        params = {name: self._blank(t) for name, t in values[0].items() if runs or id(t) in kept}
        buffers = {name: self._blank(t) for name, t in values[1].items()}
        with _lent(module, params, buffers, self._device) as lent:
            if runs:
                with nullcontext() if first else self._randomness_kept():
                    problems += self._try(module, prefix)
        problems += [f"{prefix}{name}" for name in _hidden(module)]
        for own, result in zip(values, lent, strict=True):
            for name, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in known and first and _is_blank(result.get(name)):
                    problems.append(f"{prefix}{name}")
                known.add(id(tensor))
                if own is values[1]:
                    module._buffers[name] = made.setdefault(id(tensor), result[name])  # noqa: SLF001
                elif id(tensor) in kept:
                    kept.discard(id(tensor))
                    value = nn.Parameter(result[name].detach(), requires_grad=tensor.requires_grad)
                    torch.utils.swap_tensors(tensor, value)
        return problems

    @contextmanager
    def _randomness_kept(self) -> Iterator[None]:
        """Leave the generators as they were before the `with` block."""
        before = random_state(self._device)
        try:
            yield
        finally:
            set_random_state(self._device, before)

    def _blank(self, tensor: Tensor | None) -> Tensor | None:
        """Return memory like a tensor's: a copy, or, for one on meta, filled with what no initialiser leaves."""
        if tensor is None:
            return None
        if not tensor.is_meta:
            return tensor.detach().clone()
        blank = torch.empty_like(tensor, device=self._device).detach()
        if tensor.is_floating_point() or tensor.is_complex():
            blank.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            blank.fill_(torch.iinfo(tensor.dtype).min)
        return blank.requires_grad_(tensor.requires_grad)

    def _try(self, module: nn.Module, prefix: str) -> list[str]:
        try:
            self._make(module)
        except Exception as error:  # noqa: BLE001  (whatever it is, all ranks have to hear of it)
            return [f"{prefix or type(module).__name__} ({type(error).__name__}: {error})"]
        return []


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def _has_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001
    return any(tensor is not None and tensor.is_meta for tensor in own) or bool(_hidden(module))


def _hidden(module: nn.Module) -> list[str]:
    """Return the attributes that are tensors on the meta device, neither parameters nor buffers."""
    return [name for name, value in own_attributes(module) if isinstance(value, Tensor) and value.is_meta]


def _forms(module: nn.Module) -> dict[str, Tensor]:
    own = module._parameters.items()  # noqa: SLF001
    return {name: param.to("meta") for name, param in own if param is not None}


@contextmanager
def _lent(
    module: nn.Module, params: dict[str, Any], buffers: dict[str, Any], device: torch.device
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Give a module other tensors of its own for a while, without autograd; those on meta get memory.

    Buffers that are not given are copies, so that what has its values keeps them; parameters that are not given are
    None.
    """
    before = module._parameters, module._buffers  # noqa: SLF001
    lent: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name in before[0]:
        given = params.get(name)
        if given is not None:
            value = torch.empty_like(given, device=device) if given.is_meta else given
            lent[0][name] = nn.Parameter(value, requires_grad=given.requires_grad)
        else:
            lent[0][name] = None
    for name, buffer in before[1].items():
        lent[1][name] = buffers[name] if name in buffers else None if buffer is None else buffer.clone()
    module.__dict__.update(_parameters=lent[0], _buffers=lent[1])
    try:
        with torch.no_grad():
            yield lent
    finally:
        module.__dict__.update(_parameters=before[0], _buffers=before[1])


def _is_blank(tensor: Tensor | None) -> bool:
    """Return whether any floating element, or all others, are as `MetaModel._blank` has left them."""
    if tensor is None or tensor.is_meta:
        return True
    if not tensor.numel() or tensor.dtype is torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())
