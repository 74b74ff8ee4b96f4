"""`mpizero plan`: what a model takes and costs at each stage, before there is a cluster to run it on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mpizero.bench.plots import picture_file
from mpizero.cli.offload_words import OFFLOAD_FLAGS
from mpizero.cli.plan_question import DEVICES, OPTIMIZERS, OWN, UNITS, Question, question_of
from mpizero.cli.plan_text import Row, record_of, text_of
from mpizero.cli.plan_words import show_size
from mpizero.errors import ArgumentError, must_be
from mpizero.plan import ACCOUNTS, DTYPES, advice, smallest_stage, step_of
from mpizero.plan.accounts import account_bytes
from mpizero.plan.times import Network, compute_seconds, times_of, traffic_of

if TYPE_CHECKING:
    import argparse

    from mpizero.plan import Setup

__all__ = ["configure", "run"]

FLAGS = (
    ("--ranks", None, "number of ranks (required)"),
    ("--params", None, "the model: its number of parameters, as 7e9, 7B or 350M"),
    ("--layers", None, "or: a transformer of so many layers, each a unit"),
    ("--width", None, "with --layers: of the residual stream"),
    ("--vocabulary", None, "with --layers: rows of the embedding, shared with the output layer"),
    ("--context", None, "with --layers: positions that have an embedding, and over which attention is counted"),
    ("--gated", None, "with --layers: the width of a gated MLP, as 11008"),
    ("--factory", None, "or: module:function that builds a torch module; it is called on the meta device"),
    ("--units", None, f"--params: how many equal units ({UNITS} by default); --factory: names of classes (by size)"),
    ("--stage", None, "stages to show, with commas between (all by default)"),
    ("--precision", "bf16", f"in which forward and backward compute: {', '.join(DTYPES)}"),
    ("--reduce", None, "in which gradients travel (as --precision by default)"),
    ("--keep-fp32", None, "what stays in fp32: names of classes with --factory, of parameters with --layers, as norm"),
    ("--optimizer", "adam", f"{', '.join(OPTIMIZERS)}: 2, 1 and 0 values of state per parameter"),
    ("--accounting", OWN, f"bytes as {OWN} holds them, or by an account per parameter: " + ", ".join(
        f"{account.name} ({account.about})" for account in ACCOUNTS.values())),
    ("--per-node", "8", "ranks on a node"),
    ("--device", "gpu", f"where the model lies: {', '.join(DEVICES)}; in host memory a node's ranks share parameters"),
    ("--group", None, "ranks of a group of hybrid sharding (all by default)"),
    ("--prefetch", "1", "units gathered ahead of need at stage 3"),
    ("--bucket", "1M", "bytes of gradients that are reduced at once at least; K, M, G: powers of 1024"),
    ("--micro-batches", "1", "backwards of a step, all but the last in no_sync"),
    ("--memory", None, "what a rank has, as 80GB; exit code 2 where no stage fits"),
    ("--activations", "0B", "bytes of activations of a rank, beside which the plan has to fit"),
    ("--batch", None, "sequences of a step over all ranks"),
    ("--alpha", "0s", "latency of a message within a node, and between nodes; one time serves both"),
    ("--beta", "450GB/s,50GB/s", "bandwidth of a rank within a node, and of a network port; one rate serves both"),
    ("--wires", None, "network ports of a node (one for each rank by default)"),
    ("--flops", None, "operations per second that a rank reaches, as 400T; needs --tokens"),
    ("--tokens", None, "tokens of a micro-batch of one rank; needs --flops"),
    *OFFLOAD_FLAGS,
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, all as text: `run` checks them."""
    for flag, default, text in FLAGS:
        shown = f" ({default} by default)" if default is not None else ""
        parser.add_argument(flag, default=default, required=flag == "--ranks", help=f"{text}{shown}")
    parser.add_argument("--private", action="store_true", help="with --device cpu: node_shared=False")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", metavar="FILE", help="draw bytes and times, as .png or .svg; needs matplotlib")
    parser.epilog = (
        "Nothing is run. Sizes are powers of 1000 (GB) or 1024 (GiB), rates bytes or bits per second: 50GB/s, "
        "400Gbit/s, or inf. docs/planning.md tells how to read the tables."
    )


def run(options: argparse.Namespace) -> int:
    """Plan each stage, and print tables or JSON.

    Raises:
        ArgumentError: for values that make no sense, and, after the tables, where no stage fits the memory.
        MpiZeroError: for `--plot` without matplotlib.
    """
    question = question_of(options)
    target = picture_file("--plot", options.plot)
    rows = [_row(question, setup) for setup in question.setups]
    stage = smallest_stage([(row.stage, row.peak) for row in rows], question.limits)
    chosen = next((row for row in rows if row.stage == stage), rows[-1])
    said = advice(question.model, {row.stage: row.step for row in rows}, question.limits, chosen.times)
    if options.json:
        print(json.dumps(record_of(question, rows, stage, said), indent=2))
    else:
        print(text_of(question, rows, stage, said))
    if target is not None:
        from mpizero.cli.plan_plot import draw_plan

        draw_plan(question, rows, target)
    if stage is None:
        least = min(row.peak for row in rows) + question.limits.activations
        remedy = said[0].rstrip(".") if said else ""
        raise ArgumentError(
            must_be("--memory", f"{show_size(least)} or more", show_size(question.limits.memory), remedy)
        )
    return 0


def _row(question: Question, setup: Setup) -> Row:
    step = step_of(question.model, setup)
    network = Network(setup, *question.links, wires=question.wires)
    compute = compute_seconds(question.model, question.tokens, question.flops) if question.flops else ()
    numel = question.model.numel
    accounts = {name: account_bytes(numel, setup.shards, setup.stage, account) for name, account in ACCOUNTS.items()}
    state, buffers = step.phases["between steps"].state, 0
    if question.accounting != OWN:
        state = accounts[question.accounting]
        buffers = 2 * max((2 * unit.numel for unit in question.model.units[:-1]), default=0) * (setup.stage == 3)
    return Row(
        stage=setup.stage,
        step=step,
        state=state,
        unit_buffers=buffers,
        peak=step.peak if question.accounting == OWN else state.total + buffers,
        accounts={name: bytes_.total for name, bytes_ in accounts.items()},
        traffic=traffic_of(step),
        times=times_of(step, network, compute, per_byte=question.per_byte(setup)),
    )
