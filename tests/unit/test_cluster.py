"""bin/cluster without hosts: bad command lines, where ranks go, and what their environment is."""

import os
import shutil
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    """Return a module of bin/cluster by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "bin"))
    return import_module


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("up --hosts 0", "argument --hosts: must be a whole number from 1 to 32 (got '0')"),
        ("up --hosts 33", "must be a whole number from 1 to 32 (got '33')"),
        ("up --hosts two", "must be a whole number from 1 to 32 (got 'two')"),
        ("up --rate 1", "argument --rate: must be none or 1mbit to 100gbit, such as 1gbit or 2.5gbit (got '1')"),
        ("up --rate 999kbit", "such as 1gbit or 2.5gbit (got '999kbit')"),
        ("up --rate 101gbit", "such as 1gbit or 2.5gbit (got '101gbit')"),
        ("up --rate -1gbit", "expected one argument"),
        ("up --rate fast", "(got 'fast')"),
        ("up --name Mz", "argument --name: must be 1 to 6 small letters (got 'Mz')"),
        ("up --name mz1", "must be 1 to 6 small letters (got 'mz1')"),
        ("up --name ../mz", "must be 1 to 6 small letters (got '../mz')"),
        ("down --name abcdefg", "must be 1 to 6 small letters (got 'abcdefg')"),
        ("up --host 2", "unrecognized arguments: --host 2"),
        ("up -- python", "must come after a -- that stands alone"),
        ("run -n 2", "must come after a -- that stands alone"),
        ("run -n 2 python x.py", "unrecognized arguments: python x.py"),
        ("run -n 0 -- python", "argument -n/--ranks: must be a whole number, at least 1 (got '0')"),
        ("run --per-host 3,,1 -- python", "such as 3,2,1 (got '3,,1')"),
        ("run --per-host 0,0 -- python", "such as 3,2,1 (got '0,0')"),
        ("run --per-host -1 -- python", "such as 3,2,1 (got '-1')"),
        ("run --map zigzag -- python", "invalid choice: 'zigzag'"),
        ("run --timeout 0 -- python", "argument --timeout: must be a number of seconds above 0 (got '0')"),
        ("run --timeout nan -- python", "must be a number of seconds above 0 (got 'nan')"),
        ("start", "invalid choice: 'start'"),
        ("", "the following arguments are required"),
    ],
)
def test_bad_command_line(module, capsys, line, said):
    with pytest.raises(SystemExit) as stopped:
        module("_cluster").main(line.split())
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_is_for_root_and_says_so(module, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for line in ("up", "down", "status", "run -n 1 -- python"):
        assert module("_cluster").main(line.split()) == 2
        assert "the user of bin/cluster must be root (got 'user id 1000')" in capsys.readouterr().err


@pytest.mark.parametrize(("program", "package"), [("tc", "iproute2"), ("nsenter", "util-linux")])
def test_a_missing_program_is_named_with_its_package(module, monkeypatch, capsys, program, package):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == program else f"/bin/{name}")
    assert module("_cluster").main(["up"]) == 2
    assert f"needs the program {program}: install the package {package}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", 10**9), ("1000mbit", 10**9), ("2.5gbit", 25 * 10**8), ("5000kbit", 5 * 10**6)]
)
def test_rates(module, text, rate):
    assert module("_cluster")._rate(text) == rate
    assert module("_cluster")._rate(module("_cluster_state").rate_text(rate)) == rate


@pytest.mark.parametrize(
    ("hosts", "ranks", "per_host", "counts"),
    [
        (2, 4, [2], [2, 2]),
        (3, 4, [2], [2, 2, 0]),
        (3, 3, [2], [2, 1, 0]),
        (3, None, [2], [2, 2, 2]),
        (3, 6, [3, 2, 1], [3, 2, 1]),
        (3, None, [3, 1], [3, 1, 0]),
        (3, 7, None, [3, 2, 2]),
        (3, 2, None, [1, 1, 0]),
    ],
)
def test_spread(module, hosts, ranks, per_host, counts):
    assert module("_cluster_job").spread(hosts, ranks, per_host) == counts


@pytest.mark.parametrize(
    ("ranks", "per_host", "said"),
    [
        (None, None, "the number of ranks must be given"),
        (5, [2], "-n must be at most 4, 2 on each of 2 hosts (got 5)"),
        (5, [3, 1], "-n must be 4, the sum of --per-host (got 5)"),
        (6, [3, 2, 1], "--per-host must be one number, or one for each of 2 hosts (got [3, 2, 1])"),
    ],
)
def test_spread_refuses(module, ranks, per_host, said):
    with pytest.raises(module("_cluster_state").ClusterError) as error:
        module("_cluster_job").spread(2, ranks, per_host)
    assert said in str(error.value)


def test_placement(module):
    place = module("_cluster_job").place
    assert place([3, 2, 1], "block") == [0, 0, 0, 1, 1, 2]
    assert place([3, 2, 1], "round-robin") == [0, 1, 2, 0, 1, 0]
    assert place([0, 2, 1], "round-robin") == [1, 2, 1]


def test_an_environment_loses_the_outer_job_and_keeps_the_users_choice(module):
    given = {"PMIX_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_btl": "^sm", "MPIZERO_TIMEOUT": "9", "PATH": "/x"}
    made = module("_cluster_job").environment(given, Path("/opt/bin/mpirun"))
    assert {"PMIX_RANK", "OMPI_COMM_WORLD_SIZE"}.isdisjoint(made)
    assert (made["OMPI_MCA_btl"], made["MPIZERO_TIMEOUT"], made["PATH"]) == ("^sm", "9", "/opt/bin:/x")
    assert made["OMPI_MCA_btl_tcp_if_include"] == "net0"
