"""The exceptions that mpizero raises for a user's mistake, and the one form that their texts have.

Every class is an `MpiZeroError` and also the builtin that fits (`ValueError`, `TypeError`, ...), so that callers may
catch either. The text is `<what> must be <rule> (got <value>)`, then what to do instead.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "DeviceError",
    "DeviceMemoryError",
    "DiskError",
    "LaunchError",
    "MpiNotFoundError",
    "MpiZeroError",
    "NonFiniteError",
    "ShardError",
    "must_be",
]


class MpiZeroError(Exception):
    """Be the base of every error that mpizero raises on purpose."""


class ArgumentError(MpiZeroError, ValueError):
    """Say that an argument has a value that the call cannot take."""


class ArgumentTypeError(MpiZeroError, TypeError):
    """Say that an argument has a type, or an array a dtype, that the call cannot take."""


class CollectiveError(MpiZeroError, RuntimeError):
    """Say that a collective was called in a state or an order in which it cannot work."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Say that a peer did not answer within the communicator's time-out."""


class DeviceError(MpiZeroError, RuntimeError):
    """Say that a GPU refused or failed what a collective needs of it."""


class DeviceMemoryError(DeviceError, MemoryError):
    """Say that a GPU of some rank has no room for what a collective needs; all ranks raise it and the job can go on."""


class DiskError(MpiZeroError, OSError):
    """Say that a disk has no room, or failed, for what was moved out of memory; all ranks raise it."""


class ShardError(MpiZeroError, RuntimeError):
    """Say that a sharded model or its optimizer was used in a way that would give wrong numbers."""


class NonFiniteError(MpiZeroError, FloatingPointError):
    """Say that gradients or parameters are NaN or infinite; all ranks raise it, and the job can go on."""


class MpiNotFoundError(MpiZeroError, ImportError):
    """Say that no MPI library could be loaded."""


class LaunchError(MpiZeroError, RuntimeError):
    """Say that a job was started in a way in which its ranks cannot find each other."""


def must_be(what: str, rule: str, got: object, remedy: str = "") -> str:
    """Return the text of an error: `<what> must be <rule> (got <value>)`, then the remedy.

    Args:
        what: the thing that is wrong, as the user knows it ("stage", "parameter 'head.weight'").
        rule: what it has to be ("one of 0, 1, 2, 3").
        got: the value that came; strings are shown with quotes.
        remedy: one sentence that says what to do instead, without its full stop.
    """
    text = f"{what} must be {rule} (got {got!r})"
    return f"{text}: {remedy}" if remedy else text
