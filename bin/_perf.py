"""What the scripts `*_perf` have in common: the environment of the checkout, and mpizero out of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"


def start(operation: str) -> None:
    """Become the microbenchmark of one operation; ends the process."""
    if sys.prefix == sys.base_prefix and os.access(PYTHON, os.X_OK):
        os.execv(PYTHON, [str(PYTHON), str(Path(sys.argv[0]).resolve()), *sys.argv[1:]])
    sys.path[0] = str(ROOT)
    from mpizero.bench.perf import main

    sys.exit(main(operation))
