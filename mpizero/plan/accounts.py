"""The two ways in which bytes per parameter are usually counted, for mixed precision with Adam.

They count what a trainer holds between two steps if it keeps bf16 gradients, alone or beside an fp32 accumulator, and
know no units, padding or buffers. What mpizero holds is in `step`: 18 bytes, an fp32 accumulator and no bf16 gradients
but those on their way.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.errors import ArgumentError, must_be
from mpizero.plan.memory import StateBytes, check_stage

__all__ = ["ACCOUNTS", "Account", "account_bytes"]


@dataclass(frozen=True, kw_only=True)
class Account:
    """Say how many bytes of each kind a parameter takes where nothing is cut."""

    name: str
    parameters: int = 2
    """The bf16 working copy."""
    gradients: int
    optimizer: int = 12
    """The fp32 master copy and Adam's two moments."""
    about: str


ACCOUNTS = {
    "16": Account(name="16", gradients=2, about="bf16 gradients"),
    "20": Account(name="20", gradients=6, about="bf16 gradients and an fp32 accumulator"),
}


def account_bytes(numel: int, ranks: int, stage: int, account: Account) -> StateBytes:
    """Return one rank's bytes by an account.

    Stage 1 divides optimizer state by the number of ranks, 2 gradients as well, 3 parameters as well (Rajbhandari et
    al., "ZeRO", 2020, section 3, whose 16 bytes are the account "16"). mpizero's stage 1 also divides gradients.

    Args:
        numel: parameters of the model.
        ranks: over how many ranks they are cut.
        stage: 0 to 3.
        account: one of `ACCOUNTS`.

    Raises:
        ArgumentError: for an unknown stage, and ranks or parameters below 1.
    """
    check_stage(stage)
    for what, value in (("parameters", numel), ("ranks", ranks)):
        if value < 1:
            raise ArgumentError(must_be(what, "at least 1", value))
    shares = [1 / ranks if stage >= threshold else 1.0 for threshold in (3, 2, 1)]
    return StateBytes(
        parameters=numel * account.parameters * shares[0],
        gradients=numel * account.gradients * shares[1],
        optimizer=numel * account.optimizer * shares[2],
    )
