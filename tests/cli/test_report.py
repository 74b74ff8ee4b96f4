"""mpizero report after a real job of which a rank was killed."""

import subprocess
import sys
from pathlib import Path

from mpizero.cli import main

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import os, signal
import numpy as np
import mpizero
world = mpizero.world()
for _ in range(5):
    mpizero.all_reduce(np.ones(4, np.float32))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
mpizero.barrier()
"""


def test_a_killed_rank_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPIZERO_RECORD", str(tmp_path / "records"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", "3", "--timeout", "60", str(script)]
    job = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert job.returncode not in {0, 124}, job.stderr
    assert main(["report", "--trace", str(tmp_path / "trace.json")]) == 0
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    assert err == ""
    assert text.startswith("3 ranks on ")
    assert "ank 1 on " in text.split(": ", 1)[1].split(" waited ")[0], out
    assert "killed, or os._exit" in text
    assert "in its own code after all_reduce #5" in text
    assert (tmp_path / "trace.json").stat().st_size > 1000
