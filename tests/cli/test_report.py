"""mpizero report after a real job of which a rank was killed."""

from helpers.jobs import TIMED_OUT, run_script

from mpizero.cli import main

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
    code, text = run_script(tmp_path, SCRIPT, 3)
    assert code not in {0, TIMED_OUT}, text
    assert main(["report", "--trace", str(tmp_path / "trace.json")]) == 0
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    assert err == ""
    assert text.startswith("3 ranks on ")
    assert "ank 1 on " in text.split(": ", 1)[1].split(" waited ")[0], out
    assert "killed, or os._exit" in text
    assert "in its own code after all_reduce #5" in text
    assert (tmp_path / "trace.json").stat().st_size > 1000
