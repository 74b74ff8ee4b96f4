"""Text as a stream of bytes, read where it lies: nothing is loaded ahead, whatever the size of the folder."""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Text"]

SUFFIXES = {".py", ".txt", ".md", ".rst", ".tex", ".csv", ".json", ".c", ".h", ".cpp", ".f90", ".html"}
"""What counts as text in a folder; a file that is named by itself is read whatever it is called."""
HELD_OUT = 20
"""One file in this many is kept for validation; of a single file, its last part."""


class Text:
    """Draw random windows of bytes from files."""

    def __init__(self, ranges: list[tuple[Path, int, int]], length: int, device: str = "cpu") -> None:
        """Use the byte ranges (path, start, stop) that hold at least one window of `length` bytes and its successor."""
        self.length, self.device = length, device
        self.ranges = [(path, start, stop) for path, start, stop in ranges if stop - start > length]
        self.ends = list(accumulate(stop - start - length for _, start, stop in self.ranges))

    @classmethod
    def split(cls, path: Path, length: int, device: str = "cpu") -> tuple[Text, Text]:
        """Return the text under `path` for training and for validation.

        Args:
            path: a file, or a folder whose text files (by their endings) are used, in the order of their names.
            length: bytes of a window.
            device: where batches are to lie, as torch names it.

        Raises:
            ArgumentError: if there is no such path, or too little text in it for one window of each kind.
        """
        files = _files(path)
        if len(files) == 1:
            size = files[0].stat().st_size
            cut = size - max(size // HELD_OUT, length + 1)
            train, valid = [(files[0], 0, max(cut, 0))], [(files[0], max(cut, 0), size)]
        else:
            ranges = [(file, 0, file.stat().st_size) for file in files]
            valid = ranges[::HELD_OUT]
            train = [entry for number, entry in enumerate(ranges) if number % HELD_OUT]
        pair = cls(train, length, device), cls(valid, length, device)
        if not all(part.ranges for part in pair):
            total = sum(file.stat().st_size for file in files)
            rule = f"text of more than {2 * length + 2} bytes in files of more than {length}"
            raise ArgumentError(must_be("data", rule, f"{total} bytes in {len(files)} files under {path}"))
        return pair

    def batch(self, count: int, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return `count` random windows and the bytes that follow each of theirs, int64, shape (count, length)."""
        import torch

        draw = random.Random(repr(seed))  # noqa: S311  (no secrets here)
        windows = [torch.frombuffer(bytearray(self._window(draw)), dtype=torch.uint8) for _ in range(count)]
        whole = torch.stack(windows).to(self.device).long()
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def _window(self, draw: random.Random) -> bytes:
        position = draw.randrange(self.ends[-1])
        index = bisect_right(self.ends, position)
        path, start, _ = self.ranges[index]
        before = self.ends[index - 1] if index else 0
        with path.open("rb") as file:
            file.seek(start + position - before)
            return file.read(self.length + 1)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ArgumentError(must_be("data", "a file or a folder that exists", str(path)))
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in {"site-packages", "__pycache__"})
        found += [Path(folder, name) for name in sorted(names) if Path(name).suffix in SUFFIXES]
    return found
