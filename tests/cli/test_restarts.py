"""mzrun --restarts: when a job is started again, on which hosts, and that a training then ends as if undisturbed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpizero.cli import mzrun, restarts
from mpizero.cli.restarts import Launch, Policy, run_job
from mpizero.comm import run_loopback
from mpizero.comm.launch import Launcher

ROOT = Path(__file__).parents[2]
MZRUN = [sys.executable, str(ROOT / "bin" / "mzrun")]
FAKE = """#!/bin/sh
here={here}
case "$*" in *sweep.py*)
    case "$*" in *dead*) echo "ssh: no route to host" >&2; exit 255;; esac
    exit 0;;
esac
echo "$MPIZERO_RESTART $*" >> $here/starts
code=$(sed -n "$(wc -l < $here/starts)p" $here/codes)
{body}
exit $code
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Run a job by a launcher that ends with one exit code after the other; return the last, and its command lines."""
    monkeypatch.delenv("MPIZERO_RESTART", raising=False)

    def fake(codes, *, body="", hosts=(), ranks=4, quick=0.0, vendor="mpich", **policy):
        monkeypatch.setattr(restarts, "QUICK", quick)
        (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
        (tmp_path / "starts").touch()
        program = tmp_path / "mpirun"
        program.write_text(FAKE.format(here=tmp_path, body=body))
        program.chmod(0o755)
        launcher = Launcher(path=str(program), vendor=vendor, version="1")
        launch = Launch(launcher=launcher, ranks=ranks, hosts=hosts, program=("x",), variables=dict(os.environ))
        code = run_job(launch, Policy(**policy), 60)
        return code, (tmp_path / "starts").read_text().splitlines()

    return fake


def test_a_job_is_started_again_until_it_succeeds(fake, capsys):
    code, starts = fake([1, 137, 0, 9], restarts=5)
    assert (code, starts) == (0, [" -n 4 x", "1 -n 4 x", "2 -n 4 x"])
    said = re.sub(r"after \d+ s", "after T", capsys.readouterr().err).splitlines()
    assert said == [
        "mzrun: the job ended with exit code 1 after T; restart 1 of 5 on 4 ranks",
        "mzrun: the job ended with exit code 137 (SIGKILL) after T; restart 2 of 5 on 4 ranks",
    ]


def test_restarts_go_on_counting_from_the_environment(fake, monkeypatch):
    monkeypatch.setenv("MPIZERO_RESTART", "3")
    assert fake([1, 0], restarts=1)[1] == ["3 -n 4 x", "4 -n 4 x"]


@pytest.mark.parametrize(
    ("codes", "options", "said"),
    [
        ([2], {}, "exit code 2 after 0 s; not restarted: exit code 2 is for bad usage"),
        ([1, 1, 7], {}, "exit code 7 after 0 s; not restarted: no restart of 2 is left"),
        (
            [1, 7],
            {"quick": 5},
            "exit code 7 after 0 s; not restarted: it failed within 5 s of its start twice in a row",
        ),
        ([7], {"body": "trap : USR1; kill -USR1 $PPID; sleep 0.1"}, ""),
    ],
)
def test_a_job_is_not_started_for_ever(fake, capsys, codes, options, said):
    code, starts = fake(codes, **{"restarts": 2, **options})
    assert (code, len(starts)) == (codes[-1], len(codes))
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "policy", "line"),
    [
        (("a:2", "dead:2"), {}, "1 -hosts a:2 -n 2 x"),
        (("dead", "a", "b", "c"), {}, "1 -hosts a,b,c -n 3 x"),
        (("dead", "a", "b", "c"), {"rank_counts": (1, 2, 4)}, "1 -hosts a,b,c -n 2 x"),
        (("a", "b", "c", "d"), {"rank_counts": (2,)}, "1 -hosts a,b,c,d -n 4 x"),
        (("a:2", "dead:2"), {"min_ranks": 2}, "1 -hosts a:2 -n 2 x"),
    ],
)
def test_hosts_that_do_not_answer_are_left_out(fake, hosts, policy, line):
    code, starts = fake([1, 0], hosts=hosts, restarts=1, **policy)
    assert (code, starts[-1]) == (0, line)


@pytest.mark.parametrize(
    ("hosts", "policy", "said"),
    [
        (("a:2", "dead:2"), {"min_ranks": 3}, "without dead there would be 2 ranks, less than --min-ranks 3"),
        (("a:1", "dead:3"), {"rank_counts": (4, 2)}, "without dead there would be 0 ranks"),
        (("dead",), {}, "no host answers (dead: ssh: no route to host)"),
    ],
)
def test_too_few_hosts(fake, capsys, hosts, policy, said):
    code, starts = fake([6, 0], hosts=hosts, restarts=1, **policy)
    assert (code, len(starts)) == (6, 1)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("vendor", "hosts", "flags"), [("openmpi", ("a",), ["-x", "MPIZERO_A"]), ("openmpi", (), [])])
def test_open_mpi_is_told_which_variables_to_take_along(vendor, hosts, flags):
    launcher = Launcher(path="mpirun", vendor=vendor, version="5")
    variables = {"MPIZERO_A": "1", "OTHER": "1"}
    line = Launch(launcher=launcher, ranks=1, hosts=hosts, program=("x",), variables=variables).line()
    assert line[1 : line.index("--mca")] == flags


@pytest.mark.parametrize(("vendor", "codes", "code"), [("openmpi", [0, 0], 1), ("mpich", [0], 0)])
def test_a_launcher_that_loses_a_host_and_says_0(fake, capfd, vendor, codes, code):
    body = "echo text; echo PRTE has lost communication with a remote daemon."
    assert fake(codes, body=body, hosts=("a", "b"), vendor=vendor, restarts=1)[0] == code
    shown = capfd.readouterr()
    assert shown.out.count("text\n") == len(codes)
    assert ("mzrun: the job lost a host after 0 s; restart 1 of 1 on 4 ranks" in shown.err) == (code == 1)


def test_what_a_job_left_is_ended_first(fake, tmp_path):
    """Processes in sessions of their own, whose parents are gone, one of them stopped."""
    pids, states = tmp_path / "pids", tmp_path / "states"
    pids.touch()
    leave = f"for n in 1 2; do setsid sh -c 'echo $$ >> {pids}; exec sleep 60' & done; "
    leave += f"while [ $(wc -l < {pids}) -lt 2 ]; do sleep 0.02; done; kill -STOP $(tail -1 {pids})"
    look = f"for pid in $(cat {pids}); do grep State /proc/$pid/status; done > {states} 2> /dev/null; true"
    assert fake([1, 0], body=f"if [ $code = 1 ]; then {leave}; else {look}; fi", restarts=1)[0] == 0
    assert len(pids.read_text().split()) == 2
    assert {line.split()[1] for line in states.read_text().splitlines()} <= {"Z"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--restarts 0", "--restarts must be a whole number of restarts, at least 1 (got '0')"),
        ("--restarts many", "--restarts must be a whole number of restarts, at least 1 (got 'many')"),
        ("--restarts 1 --min-ranks 3", "--min-ranks must be a whole number of ranks from 1 to 2 (got '3')"),
        ("--restarts 1 --restart-ranks 2,x", "--restart-ranks must be whole numbers of ranks, such as 4,2,1 (got 'x')"),
        ("--min-ranks 1", "--min-ranks must be given with --restarts (got '1')"),
    ],
)
def test_bad_command_line(capsys, line, said):
    assert mzrun.main(["-n", "2", *line.split(), "x.py"]) == 2
    assert said in capsys.readouterr().err


def test_a_signal_passes_through_intels_shell(tmp_path):
    """Its mpirun is a shell that waits for mpiexec.hydra, and would die of SIGUSR1 alone."""
    (tmp_path / "mpiexec.hydra").symlink_to("/bin/sh")
    inner = f"trap 'exit 9' USR1; touch {tmp_path}/up; while :; do sleep 0.02; done"
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\n{tmp_path}/mpiexec.hydra -c "{inner}"\nexit $?\n')
    (tmp_path / "mpirun").chmod(0o755)
    code = "import os, sys; from mpizero.comm.launch import Launcher; from mpizero.cli.restarts import *; "
    code += f"launcher = Launcher(path='{tmp_path}/mpirun', vendor='intel', version=''); "
    code += "launch = Launch(launcher=launcher, ranks=1, program=(), variables=dict(os.environ)); "
    code += "sys.exit(run_job(launch, Policy(), 30))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as job:
        wait_for(tmp_path / "up", job)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(20) == 9


def wait_for(path, job, what=""):
    deadline = time.monotonic() + 150
    while not (path.exists() and what in path.read_text()) and time.monotonic() < deadline:
        assert job.poll() is None, "ended too early"
        time.sleep(0.02)
    assert path.exists()


COUNTS = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpizero as mz

world, saved = mz.world(), Path(sys.argv[1])
step, stop = int(saved.read_text()) if saved.exists() else 0, mz.stop_requested()
while step < 8 and not stop:
    if (step, world.rank) == (6, 1) and "MPIZERO_RESTART" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    step = int(mz.all_reduce(np.full(1, step + 1), op="max")[0])
    stop = mz.stop_requested()
    if world.rank == 0 and (stop or step % 2 == 0):
        saved.write_text(str(step))
        print(os.environ.get("MPIZERO_RESTART"), "saved", step, flush=True)
    if step == 3:
        Path(sys.argv[2]).touch()
        while not stop:
            time.sleep(0.02)
            stop = mz.stop_requested()
        if world.rank == 0:
            saved.write_text(str(step))
"""


def test_a_job_that_is_warned_and_then_loses_a_rank_reaches_its_end(tmp_path):
    """SIGUSR1 through mzrun is seen by all ranks, which end with 0; SIGKILL of one restarts."""
    script, saved, up = tmp_path / "script.py", tmp_path / "saved", tmp_path / "up"
    script.write_text(COUNTS)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [*MZRUN, "--timeout", "90", "--restarts", "1", "-n", "2", str(script), str(saved), str(up)]
    with subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True) as job:
        wait_for(up, job)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0, job.stderr.read()
    assert saved.read_text() == "3"
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "; restart 1 of 1 on 2 ranks" in done.stderr
    told = [row for row in done.stdout.splitlines() if "saved" in row]
    assert told == ["None saved 4", "None saved 6", "1 saved 8"]


@pytest.mark.slow
def test_a_training_that_is_warned_and_then_loses_a_rank_has_the_losses_of_an_undisturbed_one(tmp_path):
    """SIGUSR1 through mzrun saves and ends with 0; SIGKILL of a rank restarts; on one rank, then on 2, bit for bit."""
    pytest.importorskip("torch")
    from mpizero.testing.faults import LOSSES, Plan, losses_of, train

    run, whole = tmp_path / "run", tmp_path / "whole"
    whole.mkdir()
    job_of = ["-m", "mpizero.testing.faults", str(run), "--every", "4"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [*MZRUN, "--timeout", "150", "--restarts", "1"]
    with subprocess.Popen(
        [*line, "-n", "1", *job_of, "--pace", "0.2"], env=env, stderr=subprocess.PIPE, text=True
    ) as job:
        wait_for(run / LOSSES, job, "\n2 ")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0, job.stderr.read()
    steps = len(losses_of(run))
    assert 2 <= steps < 12
    assert (run / "latest").read_text().strip() == f"step-{steps}"

    words = ["--fault", "kill", "--rank", "1", "--at", "11"]
    done = subprocess.run([*line, "-n", "2", *job_of, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "; restart 1 of 1 on 2 ranks" in done.stderr
    rows = [row.split()[:2] for row in (run / LOSSES).read_text().splitlines()]
    again = max(8, steps)
    expected = [(step, 1) for step in range(1, steps + 1)] + [(step, 2) for step in range(steps + 1, 11)]
    assert [(int(step), int(ranks)) for step, ranks in rows] == [
        *expected,
        *((step, 2) for step in range(again + 1, 13)),
    ]

    run_loopback(1, lambda comm: train(comm, Plan(folder=whole, may_stop=False)))
    assert losses_of(run) == losses_of(whole)


@pytest.mark.slow
def test_twenty_random_faults():
    line = [sys.executable, str(ROOT / "bin" / "faults"), "--runs", "20"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20 reached the end" in done.stdout
