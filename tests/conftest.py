"""What all tests share: which of them run here, and which in several ranks (see test_worlds.py)."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
RANKED = (HERE / "mpi", HERE / "torch")
PLUGIN = "mpizero.testing.mpi_pytest"
NO_TESTS = 5
FEW = (1, 2, 3, 4)
"""Numbers of ranks in which the tests of tests/torch run that are not marked otherwise."""
ALONE = ("tests/test_worlds.py", "tests/cli/test_cluster.py", "tests/cli/test_slurm.py")
"""Files whose tests share something and so run in one worker of pytest-xdist, one after the other."""
BESIDE = "tests/test_worlds.py::test_world[1]"
"""The world that takes one core, and so runs beside other tests."""
SIZES = re.compile(rb"\bsizes\(([^()]*)\)")
"""A use of the marker in a file of tests, with its arguments."""

found = importlib.util.find_spec("torch")
if found is None or found.origin is None:
    sys.modules["torch"] = None  # the folder tests/torch, on the path for the helpers' sake, is no torch to import

ranked_args = pytest.StashKey[list]()
"""Paths and ids under tests/mpi or tests/torch that the command line named."""

ranked_keyword = pytest.StashKey[str]()
"""The -k expression for the tests in several ranks, "" for all."""


def pytest_addoption(parser):
    group = parser.getgroup("mpizero", "tests of mpizero")
    group.addoption("--all", action="store_true", help="run the slow tests too, and products of options in full")
    group.addoption("--ranks", help="numbers of ranks for the tests under MPI, 1,2,3,4,5,7,8 by default")
    group.addoption("--thin", type=int, help="of tests/torch, run those alone that are meant for this number of ranks")
    group.addoption("--world-timeout", type=float, default=500.0, help="seconds for all tests at one number of ranks")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    settings.register_profile("serial", deadline=None)
    # All ranks have to draw the same examples.
    settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
    with_mpi = config.getoption("--with-mpi")
    settings.load_profile("ranks" if with_mpi else "serial")
    if not with_mpi:
        config.pluginmanager.import_plugin("mpizero.testing.leftovers")
        _redirect(config)
    elif not config.pluginmanager.has_plugin(PLUGIN):
        config.pluginmanager.import_plugin(PLUGIN)


def _redirect(config):
    """Run tests named by path that need several ranks through test_worlds.py."""
    named = {arg: (config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args}
    ranked = [arg for arg, path in named.items() if any(path.is_relative_to(folder) for folder in RANKED)]
    config.stash[ranked_args] = [str(config.invocation_params.dir / arg) for arg in ranked]
    config.stash[ranked_keyword] = ""
    if ranked:
        worlds = str(HERE / "test_worlds.py")
        config.args[:] = [*(arg for arg in config.args if arg not in {*ranked, worlds}), worlds]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out tests one by one, in their order, and a file of ALONE as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return path if path.endswith(ALONE) and not nodeid.endswith(BESIDE) else nodeid

    config.option.loadscopereorder = False  # else the largest files come first
    return Scheduling(config, log)


def pytest_ignore_collect(collection_path, config):
    if collection_path in RANKED and not config.getoption("--with-mpi"):
        return True
    ranks = config.getoption("--thin")
    if ranks and ranks not in FEW and collection_path.is_relative_to(HERE / "torch") and collection_path.is_file():
        return None if _may_run_in(ranks, collection_path.read_bytes()) else True
    return None


def _may_run_in(ranks, source):
    """Return False where a file's text says that none of its tests is for so many ranks: it need not be loaded."""
    uses = [found.group(1).split(b",") for found in SIZES.finditer(source)]
    numbers = {word.strip() for words in uses for word in words}
    return str(ranks).encode() in numbers or not all(word.isdigit() for word in numbers)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs with --all"))
    if config.getoption("--thin"):
        _thin_out(config, items, config.getoption("--thin"))
    worlds = [item for item in items if item.path == HERE / "test_worlds.py"]
    # Last, when the other workers have little left to do: a world takes all cores.
    items.sort(key=lambda item: 0 if item.nodeid.endswith(BESIDE) else 1 + (item in worlds))
    result = yield
    # -k selects among the tests inside the worlds, unless it names the worlds themselves.
    if config.option.keyword and worlds and not any(item in items for item in worlds):
        config.stash[ranked_keyword] = config.option.keyword
        items += worlds
    return result


def _thin_out(config, items, ranks):
    """Drop the tests of tests/torch to which this number of ranks brings nothing that another does not."""
    torch = [item for item in items if item.path.is_relative_to(HERE / "torch")]
    dropped = [item for item in torch if ranks not in _sizes_of(item)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _sizes_of(item):
    marker = item.get_closest_marker("sizes")
    return marker.args if marker else FEW


@pytest.fixture(scope="session")
def selected(pytestconfig):
    """The arguments that select tests in several ranks; skips if a user's -k leaves none."""
    keyword = pytestconfig.stash[ranked_keyword]
    paths = pytestconfig.stash[ranked_args] or [str(folder) for folder in RANKED if folder.exists()]
    args = [*paths, *(["-k", keyword] if keyword else []), *(["--all"] if pytestconfig.getoption("--all") else [])]
    if keyword:
        line = [sys.executable, "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--collect-only", "-q", *args]
        found = subprocess.run(line, cwd=HERE.parent, capture_output=True, check=False, timeout=100)
        if found.returncode == NO_TESTS:
            pytest.skip(f"no test in several ranks matches -k {keyword!r}")
    return args


@pytest.fixture(scope="session")
def thinned(pytestconfig):
    """Whether the command line leaves it open which tests run in how many ranks."""
    asked = pytestconfig.getoption("--ranks") or pytestconfig.getoption("--all")
    return not (asked or pytestconfig.stash[ranked_args] or pytestconfig.stash[ranked_keyword])
