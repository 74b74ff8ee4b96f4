"""What a sharded parameter is while its unit is not gathered, for code that reaches it as an attribute.

[Note: sharded access] Outside a unit's forward the module's parameters are shards of another shape. Code that computes
with them (a method other than forward, a forgotten `unsharded`) would fail with a message about shapes, or, where
broadcasting happens to fit, go on with wrong numbers. So `module.weight` gives a `ShardHandle`, which can be looked at
but not computed with, while iteration (`parameters()`, `named_parameters()`) gives the shards themselves, which are
what an optimizer needs. During forward and backward the attribute is the full parameter and costs nothing extra. At
stage 0 the values are whole and may be computed with, but not under autograd: that gradient would stay on its rank.
"""

from __future__ import annotations

from typing import Any

import torch

from mpizero.errors import ShardError

__all__ = ["ShardHandle", "ShardedParameters", "handle_of"]

_LOOKS = {"__repr__", "__str__", "__format__", "__len__", "__hash__", "size", "dim", "numel", "stride", "is_contiguous",
          "is_floating_point", "is_complex", "element_size", "data_ptr", "type", "untyped_storage"}  # fmt: skip
_HIDDEN = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Properties that give the values, which other properties do not."""


class ShardHandle(torch.nn.Parameter):
    """Show a shard's shape, dtype and gradient; refuse to compute. See [Note: sharded access]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a look pass, refuse everything else."""
        name = getattr(func, "__name__", "")
        handles = [arg for arg in _flat((*args, *(kwargs or {}).values())) if isinstance(arg, ShardHandle)]
        owner = handles[0] if handles else None
        if name in {"__get__", "__set__", "__delete__"}:
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "grad" or (name == "requires_grad" and func.__name__ == "__set__"):
                target = owner.__dict__["_mpizero_shard"]
                return func(target, *args[1:])
            looks = func.__name__ == "__get__" and name not in _HIDDEN
        else:
            looks = name in _LOOKS
        if name == "requires_grad_":
            owner.__dict__["_mpizero_shard"].requires_grad_(*args[1:], **(kwargs or {}))
            return owner
        if looks or _stays_whole(handles):
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (torch documents no public name for it)
                return func(*args, **(kwargs or {}))
        known_as = owner.__dict__["_mpizero_name"] if owner is not None else "?"
        raise ShardError(
            f"parameter {known_as!r} must be gathered before {name or func} can use it (got this rank's shard): it is "
            "full, and its gradient reduced, only inside the forward of its unit; call the module itself, or wrap the "
            "code in `with mpizero.unsharded(model):` on all ranks"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what it is: the values are a part of the parameter only."""
        whole = "" if self.__dict__["_mpizero_cut"] else " (whole)"
        return f"ShardHandle({self.__dict__['_mpizero_name']!r}, this rank's shard{whole}, shape {tuple(self.shape)})"


class ShardedParameters(dict[str, Any]):
    """Be a module's `_parameters`: iteration gives what is stored, a look-up hides shards behind handles."""

    def __getitem__(self, name: str) -> Any:
        """Return the full parameter while the unit is gathered, else the shard's handle."""
        value = super().__getitem__(name)
        return value if value is None else getattr(value, "_mpizero_handle", value)

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled with the module: the runtime behind it cannot be."""
        raise ShardError("a sharded module cannot be copied or pickled: copy it before mpizero.shard(...)")

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse as `__reduce__` does."""
        return self.__reduce__()


def handle_of(shard: torch.nn.Parameter, name: str, *, cut: bool) -> ShardHandle:
    """Return the handle that attribute access gives for `shard`, one and the same each time.

    Args:
        shard: what iteration gives.
        name: the parameter's name, for errors.
        cut: whether it is a part of its parameter, not all of it.
    """
    handle = ShardHandle(shard.detach(), requires_grad=shard.requires_grad)
    handle.__dict__.update(_mpizero_name=name, _mpizero_shard=shard, _mpizero_cut=cut)
    shard._mpizero_handle = handle  # type: ignore[attr-defined]  # noqa: SLF001
    return handle


def _stays_whole(handles: list[ShardHandle]) -> bool:
    """Return whether all values are there and no gradient would be taken that only the unit's forward can reduce."""
    if any(handle.__dict__["_mpizero_cut"] for handle in handles):
        return False
    return not torch.is_grad_enabled() or not any(h.__dict__["_mpizero_shard"].requires_grad for h in handles)


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
