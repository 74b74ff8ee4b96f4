"""What the command line of `mpizero plan` asks: the model, the jobs to compare, and the machine."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpizero.bench.flags import size_of
from mpizero.cli.offload_words import carriers_of, offload_of
from mpizero.cli.plan_words import amount_of, bytes_of, speed_of
from mpizero.cli.quantities import count_of, links_of, one_of
from mpizero.errors import ArgumentError, must_be
from mpizero.plan import ACCOUNTS, DTYPES, STAGES, Limits, ModelShape, Setup, equal_units, transformer, widths

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from mpizero.collectives.links import Link
    from mpizero.plan import Carriers, Moved

__all__ = ["DEVICES", "OPTIMIZERS", "OWN", "UNITS", "Question", "question_of"]

OWN = "mpizero"
DEVICES = ("gpu", "cpu")
OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
"""Values of state per parameter."""
UNITS = 32
"""Units that are assumed where only the number of parameters is known."""
SOURCES = ("params", "layers", "factory")
SHAPE_FLAGS = ("width", "vocabulary", "context", "gated")


@dataclass(frozen=True, kw_only=True)
class Question:
    """Hold what the command line asks."""

    model: ModelShape
    assumed: bool
    """Whether the units are assumed."""
    setups: tuple[Setup, ...]
    """One for each stage."""
    precision: str
    accounting: str
    limits: Limits
    links: tuple[Link, Link]
    wires: int
    tokens: int
    flops: float
    """0 where no speed is given."""
    offload: Moved | None
    """What is to be moved; each stage's setup says what of it the stage can move."""
    carriers: Carriers

    def per_byte(self, setup: Setup) -> float:
        """Return the seconds per byte, each way, that one rank's disk or link to host memory takes."""
        return self.carriers.per_byte(setup.offload, self.neighbours)

    @property
    def neighbours(self) -> int:
        """Return the ranks that a node's disk serves."""
        return min(self.setups[0].ranks, self.setups[0].per_node)


def question_of(options: argparse.Namespace) -> Question:
    """Check the options and put them together; raise ArgumentError for what makes no sense."""
    given = [name for name in SOURCES if getattr(options, name) is not None]
    if len(given) != 1:
        got = " ".join(f"--{name}" for name in given) or "none of them"
        raise ArgumentError(must_be("model", "given by one of --params, --layers with --width, and --factory", got))
    _check_belongs(options, given[0])
    one_of("--precision", options.precision, tuple(DTYPES))
    model, own = _model(options, given[0])
    per_node = count_of("--per-node", options.per_node)
    tokens, flops = options.tokens, options.flops
    if (tokens is None) != (flops is None):
        got = "--tokens" if flops is None else "--flops"
        raise ArgumentError(must_be("computation", "given by --tokens and --flops together", f"{got} alone"))
    links = links_of(options.alpha, options.beta)
    offload = offload_of(options)
    accounting = one_of("--accounting", options.accounting, (OWN, *ACCOUNTS))
    if offload is not None and accounting != OWN:
        raise ArgumentError(must_be("--offload", f"given with --accounting {OWN}", f"--accounting {accounting}"))
    return Question(
        model=model,
        assumed=given[0] == "params" and options.units is None,
        setups=_setups(options, own, per_node, offload),
        precision=options.precision,
        accounting=accounting,
        limits=Limits(
            memory=bytes_of("--memory", options.memory) if options.memory is not None else 0,
            activations=bytes_of("--activations", options.activations),
            batch=count_of("--batch", options.batch) if options.batch is not None else 0,
        ),
        links=links,
        wires=per_node if options.wires is None else count_of("--wires", options.wires),
        tokens=amount_of("--tokens", tokens) if tokens is not None else 0,
        flops=speed_of("--flops", flops) if flops is not None else 0,
        offload=offload,
        carriers=carriers_of(options),
    )


def _check_belongs(options: argparse.Namespace, source: str) -> None:
    """Refuse flags that the chosen way of naming a model would not look at."""
    for name in SHAPE_FLAGS:
        if source != "layers" and getattr(options, name) is not None:
            raise ArgumentError(must_be(f"--{name}", "given with --layers", f"with --{source}"))
    if source == "layers" and options.units is not None:
        raise ArgumentError(must_be("--units", "given with --params or --factory", "with --layers"))
    if source == "params" and options.keep_fp32 is not None:
        raise ArgumentError(must_be("--keep-fp32", "given with --layers or --factory", "with --params"))


def _model(options: argparse.Namespace, source: str) -> tuple[ModelShape, str]:
    """Return the model and the precision in which it was built."""
    if source == "params":
        numel = amount_of("--params", options.params)
        units = UNITS if options.units is None else count_of("--units", options.units)
        return equal_units(numel, min(units, numel) if options.units is None else units), "fp32"
    kept = tuple(options.keep_fp32.split(",")) if options.keep_fp32 is not None else ()
    if source == "factory":
        return _from_factory(options.factory, options.units, kept)
    if options.width is None:
        raise ArgumentError(must_be("--width", "given with --layers", "nothing"))
    others = {name: getattr(options, name) for name in SHAPE_FLAGS[1:] if getattr(options, name) is not None}
    numbers = {name: count_of(f"--{name}", text, 0) for name, text in others.items()}
    model = transformer(count_of("--layers", options.layers), count_of("--width", options.width), **numbers)
    return (_keeping(model, kept) if kept else model), "fp32"


def _keeping(model: ModelShape, words: tuple[str, ...]) -> ModelShape:
    """Keep the parameters whose names begin with one of the words in fp32."""
    names = {name for unit in model.units for name, _ in unit.parameters}
    found = frozenset(name for name in names if name.startswith(words))
    if not all(any(name.startswith(word) for name in names) for word in words):
        raise ArgumentError(must_be("--keep-fp32", f"beginnings of {', '.join(sorted(names))}", ",".join(words)))
    return replace(model, units=tuple(replace(unit, kept=found) for unit in model.units))


def _from_factory(text: str, units: str | None, kept: tuple[str, ...]) -> tuple[ModelShape, str]:
    """Build the model on torch's meta device, and return its shape and precision."""
    make = _find(text)
    try:
        import torch

        from mpizero.shard.policy import Precision
        from mpizero.shard.shapes import precision_of, shape_of
    except ImportError as error:
        raise ArgumentError(must_be("--factory", "used where torch is installed", str(error))) from error
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        got = f"{type(error).__name__}: {error}, at {last.filename}:{last.lineno}"
        rule = "a function without arguments that builds the model on torch's meta device, where tensors have no values"
        raise ArgumentError(must_be(f"--factory {text}", rule, got)) from error
    classes = _classes("--units", model, units.split(",")) if units is not None else None
    keep = _classes("--keep-fp32", model, kept) if kept else None
    # Which modules keep their precision matters, to what the others are cast does not.
    precision = Precision(param=torch.bfloat16, keep_fp32=keep)
    return shape_of(model, units=classes, precision=precision, name=text), precision_of(model)


def _find(text: str) -> Callable[[], Any]:
    """Return the function that `module:function` names; modules in the current folder are found too."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ArgumentError(must_be("--factory", "module:function", text))
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  (sys.path holds strings)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        rule = "module:function, of a module that can be imported here"
        raise ArgumentError(must_be("--factory", rule, text, str(error))) from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ArgumentError(must_be("--factory", "module:function that can be called", text))
    make: Callable[[], Any] = found
    return make


def _classes(flag: str, model: Any, names: Any) -> set[Any] | None:
    modules = getattr(model, "modules", None)
    known = {type(module).__name__: type(module) for module in modules()} if callable(modules) else {}
    missing = [name for name in names if name not in known]
    if missing and known:
        rule = f"names of the model's classes ({', '.join(sorted(known))})"
        raise ArgumentError(must_be(flag, rule, ", ".join(missing)))
    return {known[name] for name in names} if known else None


def _setups(options: argparse.Namespace, own: str, per_node: int, offload: Moved | None) -> tuple[Setup, ...]:
    stages = STAGES if options.stage is None else tuple(count_of("--stage", one, 0) for one in options.stage.split(","))
    device = one_of("--device", options.device, DEVICES)
    reduce = "" if options.reduce is None else options.reduce
    base = Setup(
        ranks=count_of("--ranks", options.ranks),
        per_node=per_node,
        widths=widths(options.precision, reduce=reduce, own=own),
        group=0 if options.group is None else count_of("--group", options.group),
        on_gpu=device == "gpu",
        node_shared=False if options.private else None,
        prefetch=count_of("--prefetch", options.prefetch, 0),
        bucket_bytes=size_of("--bucket", options.bucket),
        micro_batches=count_of("--micro-batches", options.micro_batches),
        moments=OPTIMIZERS[one_of("--optimizer", options.optimizer, tuple(OPTIMIZERS))],
    )
    setups = [replace(base, stage=stage) for stage in dict.fromkeys(stages)]
    if offload is None:
        return tuple(setups)
    whole = max(setups, key=lambda setup: setup.stage)
    if offload.at(whole.stage) != offload:
        offload.check(whole.stage, on_gpu=whole.on_gpu, node_shared=bool(whole.node_shared))
    return tuple(replace(setup, offload=offload.at(setup.stage)) for setup in setups)
