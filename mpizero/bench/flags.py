"""The command line of the microbenchmarks, with the names and meanings of nccl-tests, turned into a checked plan."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mpizero.arrays import DTYPES, dtype_named
from mpizero.bench.cases import CPU, DEVICES, NO_OP, PEERS, Plan, wires_of
from mpizero.collectives import OPERATIONS
from mpizero.collectives.call import check_reduction
from mpizero.collectives.registry import names_of
from mpizero.comm.describe import launcher_rank
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.settings import DEVICE_WIRES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["first_rank", "parse_plan", "say_once", "size_of", "sizes_between"]

GRACE = 2.0
"""Seconds that the other ranks leave to rank 0 to say what is wrong."""

BUFFERS = ("private", "symmetric")
ORDERS = ("any", "canonical")
OPS = ("sum", "mean", "max", "min", "prod")
ALL, NONE = "all", "none"
ALIASES = {"float": "float32", "double": "float64", "half": "float16", "avg": "mean"}
"""nccl-tests' words for ours."""
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PEER_OPS = ("sum", "max", "min", "prod")
"""Reductions that gloo and MPI have."""
MOST_SIZES = 10_000


def first_rank() -> bool:
    """Return whether this process is the one that speaks, told by its launcher: MPI may not have been started."""
    return (launcher_rank() or 0) == 0


def say_once(text: str) -> None:
    """Print to stderr on rank 0; the others give it time, since a launcher ends the job when one rank has ended."""
    if first_rank():
        print(text, file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE)


def parse_plan(operation: str, argv: Sequence[str]) -> Plan:
    """Return what the command line asks for.

    Args:
        operation: the collective to measure, a key of OPERATIONS.
        argv: the arguments.

    Raises:
        ArgumentError, ArgumentTypeError: for anything unknown, missing or unfit; lists what there is.
        SystemExit: after `--help`, with code 0.
    """
    options = _parser(operation).parse_args(argv)
    traits = OPERATIONS[operation]
    ops = _words("-o", options.o, OPS)
    dtypes = _words("-d", options.d, tuple(DTYPES))
    known = names_of(operation)
    every = options.algorithm == ALL
    if options.algorithm == NONE and options.versus is None:
        raise ArgumentError(must_be("--algorithm none", "given with --versus", "no --versus"))
    plan = Plan(
        operation=operation,
        sizes=sizes_between(options.b, options.e, step=options.i, factor=options.f),
        dtypes=dtypes,
        ops=ops if traits.reduces else (NO_OP,),
        root=_whole("-r", options.r, 0),
        algorithms=_algorithms(options.algorithm, tuple(known)),
        every=every,
        buffers=_words("--buffer", options.buffer, BUFFERS),
        device=_words("-D", options.device, DEVICES, single=True)[0],
        wires=_wires(options),
        every_wire=options.wire == ALL,
        order=_words("--order", options.order, ORDERS, single=True)[0],
        prepared=options.prepared,
        versus=_words("--versus", options.versus, PEERS) if options.versus is not None else (),
        iterations=_whole("-n", options.n, 1),
        warm_up=_whole("-w", options.w, 0),
        check=_words("-c", options.c, ("0", "1"), single=True) == ("1",),
        budget=None if options.budget is None else _seconds("--budget", options.budget),
        seed=_whole("--seed", options.seed, 0),
        json=options.json,
        csv=options.csv,
    )
    _check_together(plan)
    return plan


def size_of(flag: str, text: str) -> int:
    """Return the bytes that a text such as 8, 64K, 4M or 1G stands for; units are powers of 1024."""
    unit = UNITS.get(text[-1:].upper(), 1)
    number = text if unit == 1 else text[:-1]
    if not (number.isascii() and number.isdecimal()) or int(number) < 1:
        raise ArgumentError(must_be(flag, "a number of bytes, at least 1, with K, M or G or nothing behind it", text))
    return int(number) * unit


def sizes_between(low: str, high: str, *, step: str | None, factor: str | None) -> tuple[int, ...]:
    """Return the sizes from `low` to `high` bytes, by a factor or by a step.

    Args:
        low: the least size, as text (`-b`).
        high: the largest size (`-e`); one that the steps do not meet is not used.
        step: bytes between two sizes (`-i`), 1M if there is no factor either.
        factor: the ratio of two sizes (`-f`), at least 2.
    """
    start, stop = size_of("-b", low), size_of("-e", high)
    if stop < start:
        raise ArgumentError(must_be("-e", f"at least -b, {low}", high))
    if factor is not None and step is not None:
        raise ArgumentError(must_be("-f and -i", "given one without the other", f"-f {factor} -i {step}"))
    ratio = 1 if factor is None else _whole("-f", factor, 2)
    add = 0 if factor is not None else size_of("-i", step or "1M")
    found, size = [], start
    while size <= stop:
        found.append(size)
        size = size * ratio + add
        if len(found) > MOST_SIZES:
            raise ArgumentError(
                must_be("the number of sizes", f"at most {MOST_SIZES}", "more", "take -f, or a larger -i")
            )
    return tuple(found)


class _Parser(argparse.ArgumentParser):
    """Raise what is wrong, and speak on one rank alone."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (see {self.prog} --help)")

    def print_help(self, file: object = None) -> None:
        if first_rank():
            super().print_help(sys.stdout if file is None else file)  # type: ignore[arg-type]


def _parser(operation: str) -> argparse.ArgumentParser:
    about = (
        f"Measure {operation} in all ranks of the job, as nccl-tests does: {operation}_perf -b 8 -e 256M -f 4. "
        "Sizes are those of the whole array. Data are rewritten before every iteration and checked after it; the exit "
        "code is 1 if any element was wrong, 2 for a wrong command line."
    )
    parser = _Parser(prog=f"{operation}_perf", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("-b", metavar="SIZE", default="32M", help="least size in bytes, with K, M or G (default: %(default)s)")
    add("-e", metavar="SIZE", default="32M", help="largest size (default: %(default)s)")
    add("-f", metavar="FACTOR", help="from one size to the next by this factor")
    add("-i", metavar="SIZE", help="from one size to the next by this many bytes (default: 1M)")
    add("-n", metavar="N", default="20", help="timed iterations of a case (default: %(default)s)")
    add("-w", metavar="N", default="5", help="iterations before them (default: %(default)s)")
    add("-c", metavar="0|1", default="1", help="check every iteration's results (default: %(default)s)")
    add("-d", metavar="TYPE,...", default="float32", help="element types (default: %(default)s)")
    add("-o", metavar="OP,...", default="sum", help=f"reductions, of {', '.join(OPS)} (default: %(default)s)")
    add("-r", metavar="RANK", default="0", help="the root of broadcast and reduce (default: %(default)s)")
    names = ", ".join(names_of(operation))
    ways = f"of {names}; or all, or none but --versus (default: %(default)s)"
    add("--algorithm", metavar="A,...", default="auto", help=ways)
    add("--buffer", metavar="B,...", default="private", help="private, symmetric (default: %(default)s)")
    where = "cpu, cuda, or stand-in, a GPU that the host plays, for tests (default: %(default)s)"
    add("-D", "--device", metavar="DEVICE", default=CPU, help=f"where buffers lie: {where}")
    wires = f"of {', '.join(DEVICE_WIRES)}; or all that there are (default: auto)"
    add("--wire", metavar="W,...", help=f"with -D cuda, how device memory gets from rank to rank: {wires}")
    add("--order", metavar="ORDER", default="any", help="of summation: any or canonical (default: %(default)s)")
    add("--prepared", action="store_true", help="measure each case as a prepared collective too (+prepared)")
    add("--versus", metavar="PEER,...", help="measure gloo, mpi4py or both in the same run")
    add("--budget", metavar="SECONDS", help="fewer iterations, at least 3, where a case would take longer")
    add("--seed", metavar="N", default="1", help="of the order of the cases and of the data (default: %(default)s)")
    add("--json", metavar="FILE", help="write the results, for mpizero plot and other programs")
    add("--csv", metavar="FILE", help="write the rows as a table with a heading")
    return parser


def _check_together(plan: Plan) -> None:
    """Check what depends on more than one flag."""
    for dtype in plan.dtypes:
        for op in plan.ops:
            if op != NO_OP:
                _check_reduction(plan, dtype, op)
    needs = {
        "-d bfloat16": "bfloat16" in plan.dtypes,
        "--versus gloo": "gloo" in plan.versus,
        f"-D {plan.device}": plan.device != CPU,
    }
    for who, need in needs.items():
        if need and importlib.util.find_spec("torch") is None:
            raise ArgumentError(must_be(who, "used where torch is", "no torch", "pip install 'mpizero[torch]'"))
    _check_device(plan)
    for flag, path in (("--json", plan.json), ("--csv", plan.csv)):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ArgumentError(must_be(flag, "a file in a folder that exists", path))


def _check_device(plan: Plan) -> None:
    """Check what goes together on a device."""
    if plan.device == CPU:
        return
    if "gloo" in plan.versus:
        raise ArgumentError(must_be("--versus", f"mpi4py with -D {plan.device}", "gloo"))
    for algorithm in () if plan.every else plan.algorithms:
        if not wires_of(plan, algorithm):
            rule = f"one that takes --wire {','.join(plan.wires)}"
            raise ArgumentError(must_be("--algorithm", rule, algorithm, "auto takes every wire"))


def _check_reduction(plan: Plan, dtype: str, op: str) -> None:
    check_reduction(dtype_named(dtype), op)
    for peer in plan.versus:
        if op not in PEER_OPS:
            raise ArgumentError(must_be("-o", f"one of {', '.join(PEER_OPS)} beside {peer}", op))
    if "mpi4py" in plan.versus and dtype == "bfloat16":
        remedy = "MPI libraries have no datatype for bfloat16"
        raise ArgumentTypeError(must_be("-d", "a type that MPI reduces, beside mpi4py", dtype, remedy))


def _algorithms(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the algorithms of a list; the words `all` and `none` stand alone."""
    if text == NONE:
        return ()
    return known if text == ALL else _words("--algorithm", text, known)


def _wires(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the wires of a list, in which the word `all` stands alone; ("",) for host memory."""
    if options.device == CPU:
        if options.wire is not None:
            raise ArgumentError(must_be("--wire", "given with -D cuda", options.wire, "host memory has no choice"))
        return ("",)
    if options.wire == ALL:
        return tuple(wire for wire in DEVICE_WIRES if wire != "auto")
    return _words("--wire", options.wire or "auto", DEVICE_WIRES)


def _words(flag: str, text: str, known: tuple[str, ...], *, single: bool = False) -> tuple[str, ...]:
    """Return the words of a list, each of them known and there once."""
    words = [ALIASES.get(word, word) for word in text.split(",")]
    rule = f"{'one' if single else 'a list, joined by commas,'} of {', '.join(known)}"
    if single and len(words) > 1:
        raise ArgumentError(must_be(flag, rule, text))
    for word in words:
        if word not in known:
            raise ArgumentError(must_be(flag, rule, word))
    if len(set(words)) < len(words):
        raise ArgumentError(must_be(flag, "a list without repetitions", text))
    return tuple(words)


def _whole(flag: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ArgumentError(must_be(flag, f"a whole number, at least {least}", text))
    return int(text)


def _seconds(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentError(must_be(flag, "a number of seconds above 0", text))
    return value
