"""`import mpizero` starts nothing and loads little."""

import json
import subprocess
import sys

import pytest


def run(code):
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def loaded(statement):
    return set(run(f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"))


def test_import_loads_no_mpi_no_torch_no_cupy():
    assert not loaded("import mpizero") & {"mpi4py", "mpi4py.MPI", "torch", "cupy"}


@pytest.mark.parametrize("module", ["mpizero.collectives", "mpizero.comm", "mpizero.arrays", "mpizero.plan"])
def test_floors_below_shard_load_no_mpi_and_no_torch(module):
    """A DataLoader worker may import them (S20)."""
    assert not loaded(f"import {module}") & {"mpi4py.MPI", "torch", "cupy"}


def test_verbs_are_loaded_at_first_use():
    code = "import mpizero\nassert 'mpizero.collectives' not in sys.modules\nmpizero.all_reduce"
    assert "mpizero.collectives" in loaded(code)
    assert "mpi4py.MPI" not in loaded(code)


def test_import_adds_few_modules_to_numpy():
    """The bound of 100 ms over numpy, kept by what costs time: modules, of which 1 ms each is already slow."""
    more = loaded("import mpizero") - loaded("import numpy, importlib")
    assert len(more) < 20, sorted(more)


def test_collectives_add_few_modules_to_numpy():
    more = loaded("import mpizero.collectives") - loaded("import numpy")
    foreign = {name for name in more if name.partition(".")[0] != "mpizero"}
    assert len(foreign) < 60, sorted(foreign)


def test_names():
    names = run("import json, mpizero\nprint(json.dumps([mpizero.__all__, dir(mpizero)]))")
    assert sorted(names[0]) == names[1]
    with pytest.raises(AssertionError, match="module 'mpizero' has no attribute 'all_redcue'"):
        run("import mpizero\nmpizero.all_redcue")
