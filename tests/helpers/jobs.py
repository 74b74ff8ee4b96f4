"""Jobs of several ranks, started as a user starts them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIMED_OUT = 124
LIMIT = 60
"""Seconds after which a job hangs for sure; a test that reaches them fails by its exit code."""


def run_script(folder, text, ranks, limit=LIMIT):
    """Run a script's text by mzrun; return exit code and output. The job may not outlive its limit."""
    script = folder / "script.py"
    script.write_text(text)
    line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", str(ranks), "--timeout", str(limit), str(script)]
    job = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=2 * limit)
    return job.returncode, job.stdout + job.stderr
