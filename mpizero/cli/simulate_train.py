"""`mpizero simulate train`: simulates a training step on a cluster that is described, without one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from mpizero.bench.flags import size_of
from mpizero.bench.plots import FORMATS, picture_file
from mpizero.bench.timeline import draw
from mpizero.cli.offload_words import OFFLOAD_FLAGS, carriers_of, offload_of
from mpizero.cli.plan_words import amount_of
from mpizero.cli.quantities import count_of, links_of, one_of, per_byte_of, seconds_of
from mpizero.cli.step_report import Asked, record, text
from mpizero.collectives.links import Cluster, place
from mpizero.errors import ArgumentError, must_be
from mpizero.plan import transformer
from mpizero.plan.simulation import simulate_step
from mpizero.plan.training import CHOICES, SERVICES, Speeds, Stragglers, Training

if TYPE_CHECKING:
    import argparse

    from mpizero.plan import ModelShape

__all__ = ["configure", "run"]

DEVICES = ("gpu", "cpu")
PRECISIONS = {"bf16": 2, "fp16": 2, "fp32": 4}
RESHARD = {"auto": None, "yes": True, "no": False}
TENS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
DEPTH = 128
"""Width of a layer over the number of layers, where parameters alone are given: about that of GPT-3's."""
ADAM = 28
"""Bytes that Adam reads and writes per element: gradient, and master value and two moments to and fro, in fp32."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, all as text: `run` checks them."""
    parser.add_argument("operation", help="train")
    for flag, default, words in (
        ("--ranks", None, "number of ranks"),
        ("--per-node", "8", "ranks on a node"),
        ("--layers", "", "layers of a decoder-only transformer, each a unit"),
        ("--width", "", "its width"),
        ("--params", "", "its parameters in place of these, as 7e9 or 7B: layers and width are chosen"),
        ("--vocabulary", "0", "rows of its embedding"),
        ("--context", "2048", "tokens of a sequence"),
        ("--batch", "1", "sequences of a rank in one backward"),
        ("--accumulate", "1", "backwards in a step"),
        ("--stage", "3", "0 to 3"),
        ("--group", "0", "ranks over which parameters are cut, in hybrid sharding; 0 for all"),
        ("--precision", "bf16", f"of parameters in use: {', '.join(PRECISIONS)}"),
        ("--prefetch", "1", "units whose gather begins before they are needed"),
        ("--bucket", "1M", "bytes of gradients that are reduced at once, at least"),
        ("--reshard-after-forward", "auto", f"{', '.join(RESHARD)}; auto keeps the root alone"),
        ("--flops", "200T", "operations per second that a rank reaches"),
        ("--peak", "", "the same that it could reach, for the utilisation; where not given, --flops"),
        ("--memory", "1TB/s", "rate at which a rank's optimizer reads and writes"),
        ("--launch", "0s", "time that each forward and backward of a unit takes beside its operations"),
        ("--drive", "inf", "rate at which a rank's core drives messages beside computing; inf where it need not"),
        ("--alpha", "2us,20us", "latency of a message within a node, and between nodes"),
        ("--beta", "200GB/s,12.5GB/s", "bandwidth of a rank within a node, and of a network port"),
        ("--wires", "1", "network ports of a node"),
        ("--gamma", "1TB/s", "bytes of results that a rank reduces in a second"),
        ("--copy", "1TB/s", "bytes that a rank copies in a second"),
        ("--post", "0s", "time that a rank is busy with each message"),
        ("--choice", "auto", "algorithms: auto, those that mpizero takes, or best, the cheapest there are"),
        ("--service", "shared", "links on which several communicators meet: shared, or fifo, one after the other"),
        ("--straggle", "0", "spread of computing times, 0.05 for about a twentieth of them"),
        ("--slow", "", "slow ranks, as 3:1.5,17:2: rank 3 computes 1.5 times as long"),
        ("--seed", "0", "of what is drawn"),
        ("--device", "gpu", f"where the model lies: {', '.join(DEVICES)}"),
        *OFFLOAD_FLAGS,
        ("--plot", "", f"file for the timeline of rank 0, {' or '.join(FORMATS)}"),
    ):  # fmt: skip
        required = flag == "--ranks"
        shown = "required" if required else f"{default or 'none'} by default"
        parser.add_argument(flag, default=default, required=required, help=f"{words} ({shown})")
    for flag, words in (
        ("--no-sync", "gradients are reduced in the last backward of a step alone"),
        ("--node-shared", "the ranks of a node hold one copy of the full parameters together"),
        ("--recompute", "activation checkpointing: backward computes each layer's forward again"),
        ("--json", "print JSON instead of a table"),
    ):
        parser.add_argument(flag, action="store_true", help=words)
    parser.epilog = (
        "Rates are bytes or bits per second with K, M, G or T as powers of 1000. Nothing is run: the schedules that "
        "mpizero would execute are added up, and a step's events are followed."
    )


def run(options: argparse.Namespace) -> int:
    """Simulate, and print a table or JSON; raise ArgumentError for values that make no sense."""
    target = picture_file("--plot", options.plot)
    asked = _asked(options)
    choice = one_of("--choice", options.choice, CHOICES)
    service = one_of("--service", options.service, SERVICES)
    stragglers = Stragglers(
        slow=_slow(options.slow),
        spread=_number("--straggle", options.straggle),
        seed=count_of("--seed", options.seed, 0),
    )
    step = simulate_step(
        asked.training, asked.cluster, asked.speeds, stragglers=stragglers, choice=choice, service=service
    )
    print(json.dumps(record(asked, step), indent=2) if options.json else text(asked, step))
    if target is not None:
        draw(step, asked.title, target)
    return 0


def _asked(options: argparse.Namespace) -> Asked:
    ranks, per_node = count_of("--ranks", options.ranks), count_of("--per-node", options.per_node)
    context = count_of("--context", options.context)
    width = PRECISIONS[one_of("--precision", options.precision, tuple(PRECISIONS))]
    local, remote = links_of(options.alpha, options.beta)
    flops = _number("--flops", options.flops)
    training = Training(
        model=_model(options, context),
        stage=int(one_of("--stage", options.stage, tuple("0123"))),
        tokens=count_of("--batch", options.batch) * context,
        working_bytes=width,
        group=count_of("--group", options.group, 0),
        backwards=count_of("--accumulate", options.accumulate),
        no_sync=options.no_sync,
        prefetch=count_of("--prefetch", options.prefetch, 0),
        bucket_bytes=size_of("--bucket", options.bucket),
        reshard_after_forward=RESHARD[one_of("--reshard-after-forward", options.reshard_after_forward, tuple(RESHARD))],
        node_shared=options.node_shared,
        recompute=options.recompute,
        on_gpu=one_of("--device", options.device, DEVICES) == "gpu",
        offload=offload_of(options),
    )
    cluster = Cluster(
        size=ranks,
        nodes=place(ranks, per_node),
        local=local,
        remote=remote,
        gamma=per_byte_of("--gamma", options.gamma),
        copy=per_byte_of("--copy", options.copy),
        post=seconds_of("--post", options.post),
        wires=count_of("--wires", options.wires),
    )
    speeds = Speeds(
        flops=flops,
        update=(ADAM + width) * per_byte_of("--memory", options.memory),
        carry=carriers_of(options).per_byte(training.offload, min(ranks, per_node)),
        launch=seconds_of("--launch", options.launch),
        drive=per_byte_of("--drive", options.drive),
    )
    peak = _number("--peak", options.peak or options.flops, above=True)
    if peak < flops:
        rule = f"at least --flops, {options.flops}, which is what a rank reaches of it"
        raise ArgumentError(must_be("--peak", rule, options.peak))
    return Asked(
        training=training,
        cluster=cluster,
        speeds=speeds,
        peak=peak,
        precision=options.precision,
    )


def _model(options: argparse.Namespace, context: int) -> ModelShape:
    """Return the model that layers and width, or the number of its parameters, describe."""
    vocabulary = count_of("--vocabulary", options.vocabulary, 0)
    if options.params:
        if options.layers or options.width:
            raise ArgumentError(must_be("--params", "given without --layers and --width", options.params))
        number = amount_of("--params", options.params)
        width = max(128, round((number * DEPTH / 12) ** (1 / 3) / 128) * 128)
        layers = max(1, round(number / (12 * width**2)))
        return transformer(layers, width, vocabulary=vocabulary, context=context)
    for flag, value in (("--layers", options.layers), ("--width", options.width)):
        if not value:
            raise ArgumentError(must_be(flag, "given, or --params in its place", "nothing"))
    layers, width = count_of("--layers", options.layers), count_of("--width", options.width)
    return transformer(layers, width, vocabulary=vocabulary, context=context)


def _number(flag: str, written: str, *, above: bool = False) -> float:
    """Return what a number such as 7e9, 0.05 or 200T means; its letter is a power of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([KMGTP]?)", written)
    value = float(found[1]) * TENS[found[2]] if found else -1.0
    if value < 0 or (above and not value) or value == float("inf"):
        raise ArgumentError(must_be(flag, "a number as 7e9, 0.05 or 200T", written))
    return value


def _slow(written: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for word in written.split(",") if written else ():
        rank, colon, factor = word.partition(":")
        if not colon:
            raise ArgumentError(must_be("--slow", "ranks with factors, as 3:1.5,17:2", written))
        found[count_of("--slow", rank, 0)] = _number("--slow", factor, above=True)
    return found
