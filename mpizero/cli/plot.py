"""`mpizero plot results.json`: draws what `bin/*_perf --json` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.bench.plots import FORMATS, Picture, draw, pictures_of
from mpizero.bench.results import read_results
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    import argparse

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("results", metavar="RESULTS.json", nargs="+", help="what bin/*_perf --json has written")
    out = "a folder, for a .png and a .svg of each result, or one file with such an ending (default: the folder here)"
    add("--out", metavar="PATH", default=".", help=out)
    parser.epilog = "Needs matplotlib: pip install 'mpizero[plot]'."


def run(options: argparse.Namespace) -> int:
    """Draw all results and print the names of the files.

    Raises:
        ArgumentError: for results that cannot be read, or an `--out` that does not fit them.
        MpiZeroError: without matplotlib.
    """
    out = Path(options.out)
    for target, picture in _targets([Path(name) for name in options.results], out):
        draw(picture, target)
        print(target)
    return 0


def _targets(paths: list[Path], out: Path) -> list[tuple[Path, Picture]]:
    """Return each file to write with its picture."""
    read = ((path.stem, picture) for path in paths for picture in pictures_of(read_results(path)))
    named = [(f"{stem}-{picture.name}".removesuffix("-"), picture) for stem, picture in read]
    if not named:
        raise ArgumentError(must_be("results", "files with rows in them", ", ".join(map(str, paths))))
    if out.suffix in FORMATS and not out.is_dir():
        if len(named) > 1:
            pictures = f"{out} for {len(named)} pictures"
            raise ArgumentError(must_be("--out", "a folder where there are several pictures", pictures))
        if not out.resolve().parent.is_dir():
            raise ArgumentError(must_be("--out", "a file in a folder that exists", str(out)))
        return [(out, named[0][1])]
    if not out.is_dir():
        rule = f"a folder that exists, or a file with the ending {' or '.join(FORMATS)}"
        raise ArgumentError(must_be("--out", rule, str(out)))
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        raise ArgumentError(must_be("results", "files with names that differ", ", ".join(names)))
    return [(out / f"{name}{ending}", picture) for name, picture in named for ending in FORMATS]
