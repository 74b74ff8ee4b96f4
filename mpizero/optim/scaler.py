"""Scale the loss for fp16, with one answer on all ranks to whether gradients overflowed.

[Note: one answer] Each rank sees its own shards, so an overflow shows on some ranks only. Torch's scaler would let the
others step, and from then on the ranks' scales and weights would go apart in silence. Everything that its scaler does
with gradients, for `unscale_`, for `step`, and for fused optimizers, goes through one method, which says what it found;
that is where the ranks agree. It is not a public name: a test holds torch to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpizero.collectives import all_reduce
from mpizero.errors import ShardError
from mpizero.shard.optimizers import runtimes_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Scale losses and unscale gradients as `torch.amp.GradScaler`, for optimizers of sharded models.

    If any rank finds an infinity or NaN in its gradients, no rank steps, and all lower the scale. Used as torch's:
    `scaler.scale(loss).backward()`, if wanted `scaler.unscale_(optimizer)` and `mpizero.clip_grad_norm_`, then
    `scaler.step(optimizer)` and `scaler.update()`, on all ranks. Optimizers without shards are treated as torch does.

    Args:
        device: where scaled losses are, "cpu" or "cuda".
        init_scale: the first scale.
        growth_factor: what the scale is multiplied with after `growth_interval` steps without an overflow.
        backoff_factor: what it is multiplied with after an overflow.
        growth_interval: number of steps.
        enabled: whether to do anything at all.

    Raises:
        ShardError: from `unscale_` or `step`, if `no_sync` has kept gradients back, and on every rank, if the ranks'
            scales are not the same (a state dict loaded on some only): their gradients are averaged already.

    One all-reduce of 16 bytes per optimizer and step, none on one rank. On a GPU the host waits for the device to read
    what it found, once here, and as in torch's own once more before it steps. Source: Micikevicius et al., "Mixed
    Precision Training", 2018, section 3.2.
    """

    agrees_over_ranks = True
    """Tells the scalers that may be used on shards from torch's own."""

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: FBT001  (torch's signature)
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients; return, by device, whether any rank's overflowed. See [Note: one answer]."""
        runtimes = runtimes_of(optimizer)
        for runtime in runtimes:
            runtime.check_synced("unscaling")
            runtime.check_changeable("unscaling")
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for comm in {id(runtime.comm): runtime.comm for runtime in runtimes}.values():
            if comm.size > 1:
                found = self._agree(comm, found, found_inf)
        return found

    def _agree(self, comm: Any, found: dict[torch.device, Tensor], found_inf: Tensor) -> dict[torch.device, Tensor]:
        """Return what any rank found; nothing only if no rank has a gradient."""
        assert self._scale is not None  # noqa: S101  (torch has looked for it before)
        here = self._scale.device
        flags = [flag.to(here).view(()) for flag in found.values()]
        scale, *overflows = torch.stack([self._scale.view(()), *flags]).tolist()  # at once: a GPU is waited for
        said = np.array([float(bool(found)), float(any(overflows)), scale, -scale], np.float32)
        any_has, any_overflowed, largest, smallest = all_reduce(said, comm, op="max").tolist()
        if largest != -smallest:
            raise ShardError(
                f"the loss scale must be the same on all ranks (got {scale:g} on rank {comm.rank}, {-smallest:g} to "
                f"{largest:g} over all): make the scaler alike and load its state dict on every rank"
            )
        if any_has and not found:
            found = {found_inf.device: found_inf}
        for flag in found.values():
            flag.fill_(any_overflowed)
        return found
