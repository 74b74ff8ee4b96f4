"""bin/slurm and bin/check's packages without a Slurm: bad command lines, a Slurm that is there, the environment."""

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    """Return a module of bin/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "bin"))
    return import_module


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("up --hosts 0", "argument --hosts: must be a whole number from 1 to 32 (got '0')"),
        ("up --gpus 33", "argument --gpus: must be a whole number from 1 to 32 (got '33')"),
        ("up --name mz1", "must be 1 to 6 small letters (got 'mz1')"),
        ("run sinfo", "unrecognized arguments: sinfo"),
        ("run", "the command to run, and nothing else, must come after a --"),
        ("up -- sinfo", "the command to run, and nothing else, must come after a --"),
    ],
)
def test_bad_command_lines(module, capsys, line, said):
    with pytest.raises(SystemExit) as caught:
        module("_slurm").main(line.split())
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_beside_another_slurm_nothing_is_started(module, tmp_path):
    slurm = module("_slurm")
    for number, words in (
        ("7", "/usr/sbin/slurmd\0-f\0/run/mpizero-cluster/x/slurm.conf"),
        ("8", "slurmdoc"),
        ("9", ""),
    ):
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_text(words)
    slurm.refuse_beside_another(tmp_path)
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "cmdline").write_text("/usr/sbin/slurmctld\0-D")
    with pytest.raises(Exception, match=r"without a Slurm of its own \(got 'slurmctld, process 10'\)"):
        slurm.refuse_beside_another(tmp_path)


def test_the_login_node_is_outside_of_every_job(module):
    slurm = module("_slurm")
    cluster = module("_cluster_state").Cluster(name="x", hosts=2, rate=None)
    outer = {"SLURM_JOB_ID": "3", "SBATCH_ACCOUNT": "x", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0", "HOME": "/h"}
    found = slurm.environment({**outer, "OMPI_MCA_btl": "self,tcp"}, cluster)
    assert not set(outer) - {"HOME"} & set(found)
    assert (found["HOME"], found["OMPI_MCA_btl"]) == ("/h", "self,tcp")
    assert found["SLURM_CONF"].endswith("/x/slurm/slurm.conf")


def test_packages_are_installed_on_test_machines_alone(module, monkeypatch):
    setup = module("_setup")
    wanted = {"sh": "dash", "no-such-program": "mars", "no-other-program": "mars"}
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(setup.os, "geteuid", lambda: 0)
    real = setup.shutil.which
    monkeypatch.setattr(
        setup.shutil, "which", lambda name, path=None: real("sh" if name == "apt-get" else name, path=path)
    )
    assert setup.packages_missing(wanted) == ["mars"]
    monkeypatch.setattr(setup.os, "geteuid", lambda: 1000)
    assert setup.packages_missing(wanted) == []
    monkeypatch.setattr(setup.os, "geteuid", lambda: 0)
    monkeypatch.delenv("CI")
    assert setup.packages_missing(wanted) == []
