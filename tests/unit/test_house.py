"""The house's rules that can be read off the source: which floor imports which, and where foreign modules enter."""

import ast
import sys
from pathlib import Path

import pytest

import mpizero

ROOT = Path(mpizero.__file__).parent
FLOORS = ["arrays", "comm", "collectives", "plan", "shard", "optim", "checkpoint", "bench", "c10d", "cli"]
C10D_MAY = {"arrays", "comm", "collectives", "c10d"}
"""It stands beside `shard`, on the collectives; at its place in the list nothing below the commands imports it."""
SHARED = {"errors", "typing", "settings", "tables"}
DOORS = {"__init__", "__main__"}
"""Modules of the package itself: they load what is asked for, by name."""
HEIGHT = {**dict.fromkeys(SHARED, -1), **{name: height for height, name in enumerate(FLOORS)}}
TESTING_MAY = set(HEIGHT) - {"cli"}
BUILDERS = ["direct", "ring", "halving", "tree", "dissemination", "bruck", "exchange", "rooted", "scatter_gather"]
BUILDERS += ["pipeline", "double_tree", "placement", "hierarchical", "lanes", "leader", "order", "schedule"]


def modules():
    return sorted(ROOT.rglob("*.py"))


def imports(tree, *, inside_functions=True):
    """Yield (module, line) of every import; those under TYPE_CHECKING are no imports at run time, and are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imports(ast.Module(node.orelse, []), inside_functions=inside_functions)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, inside_functions=inside_functions)


def floor_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def breaches(floor, source):
    """The imports of a module's source that its floor may not have."""
    found = []
    tree = ast.parse(source)
    at_import = set(imports(tree, inside_functions=False))
    for name, line in imports(tree):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "mpizero" and floor not in DOORS and other in {*HEIGHT, "testing"} and not allowed(floor, other):
            found.append(f"line {line}: {floor} imports {other}, a floor above it")
        if top == "mpi4py" and floor != "comm":
            found.append(f"line {line}: mpi4py outside comm")
        if top == "cupy" and floor not in {"arrays", "comm"}:
            found.append(f"line {line}: cupy outside arrays and comm")
        if top in {"mpi4py", "cupy"} and (name, line) in at_import:
            found.append(f"line {line}: {top} when the module is loaded")
        below = HEIGHT.get(floor, 99) < HEIGHT["shard"] or floor in DOORS
        if top == "torch" and below and (name, line) in at_import:
            found.append(f"line {line}: torch when the module is loaded, below shard")
        if top == "torch" and floor in {"plan", "comm", "collectives"}:
            found.append(f"line {line}: {floor} knows no torch")
    return found


def allowed(floor, other):
    if floor == "testing":
        return other in TESTING_MAY or other == "testing"
    if floor == "c10d" and other in FLOORS:
        return other in C10D_MAY
    if other == "testing":
        return floor in {"cli", "bench"}
    return HEIGHT[other] <= HEIGHT[floor] and (floor not in SHARED or other in SHARED)


@pytest.mark.parametrize("path", modules(), ids=[str(path.relative_to(ROOT)) for path in modules()])
def test_imports_go_down(path):
    assert breaches(floor_of(path), path.read_text()) == []


def test_every_folder_is_a_floor():
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py") if path.parent != ROOT}
    assert folders <= {*FLOORS, "testing"}
    assert {path.stem for path in ROOT.glob("*.py")} <= {*SHARED, *DOORS}


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_are_pure(name):
    """Schedule builders know integers alone: they import each other, the registry and the standard library."""
    tree = ast.parse((ROOT / "collectives" / f"{name}.py").read_text())
    for module, line in imports(tree):
        if module.startswith("mpizero."):
            other = module.removeprefix("mpizero.collectives.").partition(".")[0]
            assert other in {*BUILDERS, "registry"}, f"line {line}: {module}"
        else:
            assert module.partition(".")[0] in {
                "__future__",
                "collections",
                "dataclasses",
                "enum",
                "functools",
                "itertools",
                "typing",
            }
            assert module.partition(".")[0] in sys.stdlib_module_names
    impure = {"open", "print", "input", "exec", "eval", "globals", "id", "hash"}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & impure


def test_registry_knows_builders_and_errors_alone():
    tree = ast.parse((ROOT / "collectives" / "registry.py").read_text())
    ours = {module.rpartition(".")[0] for module, _ in imports(tree) if module.startswith("mpizero.")}
    assert ours == {"mpizero.collectives.order", "mpizero.collectives.schedule", "mpizero.errors"}


@pytest.mark.parametrize(
    ("floor", "source"),
    [
        ("arrays", "from mpizero.comm import world"),
        ("comm", "def f():\n    from mpizero.collectives import all_reduce"),
        ("errors", "import mpizero.arrays"),
        ("settings", "from mpizero import comm"),
        ("collectives", "from mpi4py import MPI"),
        ("comm", "from mpi4py import MPI"),
        ("collectives", "def f():\n    import torch"),
        ("arrays", "import torch"),
        ("arrays", "class A:\n    import torch"),
        ("plan", "import torch.nn"),
        ("shard", "import cupy"),
        ("shard", "from mpizero.optim import clip_grad_norm_"),
        ("optim", "from mpizero.testing import parity"),
        ("testing", "from mpizero.cli import main"),
        ("c10d", "from mpizero.shard import shard"),
        ("bench", "import mpizero.c10d"),
        ("__init__", "import torch"),
        ("arrays", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
    ],
)
def test_a_breach_is_found(floor, source):
    assert breaches(floor, source)


@pytest.mark.parametrize(
    ("floor", "source"),
    [
        ("comm", "from mpizero.arrays import View"),
        ("comm", "def f():\n    from mpi4py import MPI"),
        ("arrays", "def f():\n    import torch"),
        ("arrays", "if TYPE_CHECKING:\n    import torch\n    from mpizero.shard import shard"),
        ("shard", "import torch"),
        ("c10d", "import torch\nfrom mpizero.comm.raw import mpi"),
        ("errors", "from mpizero.typing import Bytes"),
        ("testing", "from mpizero.optim import clip_grad_norm_"),
    ],
)
def test_what_is_allowed_is_no_breach(floor, source):
    assert breaches(floor, source) == []
