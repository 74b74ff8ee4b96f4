"""Every public name is documented, and the verbs say what they take, give, send and refuse."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import mpizero
from mpizero import collectives

FLOORS = ("arrays", "comm", "collectives", "plan", "shard", "optim", "checkpoint", "testing")
VERBS = ("all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter")


def modules():
    found = ["mpizero", "mpizero.errors", "mpizero.settings", "mpizero.typing"]
    for floor in FLOORS:
        try:
            package = importlib.import_module(f"mpizero.{floor}")
        except ImportError:
            continue
        found += [package.__name__]
        found += [info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return found


def members(module):
    """The public functions and classes that a module defines, and the classes' public methods."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) or inspect.isclass(value) or hasattr(value, "__wrapped__"):
            yield name, value
        if inspect.isclass(value):
            for inner, attribute in vars(value).items():
                function = (
                    attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
                )
                if not inner.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{inner}", function


@pytest.mark.parametrize("name", modules())
def test_everything_public_has_a_docstring(name):
    module = importlib.import_module(name)
    assert module.__doc__ or not Path(module.__file__).read_text().strip(), name
    # A dataclass without a docstring is given its signature as one.
    bare = [member for member, value in members(module) if not value.__doc__ or re.match(r"\w+\(", value.__doc__)]
    assert bare == []


def test_public_names_have_docstrings():
    for name in mpizero.__all__:
        try:
            value = getattr(mpizero, name)
        except ImportError:
            continue  # a floor that is not built yet
        assert value.__doc__, name


def test_all_names_what_is_there():
    for name in modules():
        module = importlib.import_module(name)
        if name != "mpizero":
            assert [entry for entry in getattr(module, "__all__", []) if not hasattr(module, entry)] == [], name


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_are_documented(verb):
    text = getattr(mpizero, verb).__doc__
    signature = inspect.signature(getattr(mpizero, verb))
    for parameter in signature.parameters:
        assert f"{parameter}:" in text, parameter
    assert re.search(r"\bbytes?\b", text), "how much is sent"
    if verb != "barrier":
        assert "Returns:" in text
        assert re.search(r"\bshape\b|\belements\b", text)
    else:
        assert text.startswith("Return")
    names = {entry.name for entry in collectives.algorithms_of(verb)} | {"auto", "native"}
    listed = re.search(r"algorithm: (.*?)\.?\n\s*(?:\w+:|\n|$)", f"{text}\n", re.DOTALL).group(1)
    assert {name for name in names if name not in listed} == set()


def test_errors_of_the_verbs_are_documented_once():
    text = collectives.verbs.__doc__
    for error in ("ArgumentTypeError", "ArgumentError", "CollectiveTimeoutError"):
        assert error in text


@pytest.mark.parametrize("name", ["direct", "ring", "halving", "tree", "dissemination"])
def test_builders_name_their_source(name):
    text = importlib.import_module(f"mpizero.collectives.{name}").__doc__
    assert re.search(r"Source: .*(19|20)\d\d", text, re.DOTALL)
    assert re.search(r"\brounds?\b", text)
    assert re.search(r"\bbytes?\b|\belements\b", text)
