"""Make several hosts of this machine, joined by links of a given rate, and run MPI jobs over them.

Each host is a network namespace with a host name of its own: to Open MPI and mpizero they are separate nodes.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from _cluster_job import Job, place, run, spread
from _cluster_net import check_machine, make, parts, processes, rates, remove
from _cluster_state import UNITS, Cluster, ClusterError, address, locked, rate_text, read

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN_USAGE = (
    "bin/cluster run -n N [--per-host M | A,B,...] [--map ORDER] [--timeout SECONDS] [--name NAME] -- COMMAND ..."
)
EXAMPLES = """\
examples (as root):
  bin/cluster up --hosts 2 --rate 1gbit
  bin/cluster run -n 4 --per-host 2 -- python train.py
  bin/cluster run --per-host 3,1 --map round-robin -- python -m pytest --with-mpi tests/mpi
  bin/cluster down
"""
BAD_USAGE = 2
INTERRUPTED = 130
RATES = (10**6, 10**11)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, the job's, or 2 for what cannot be done.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    head, program = split(words)
    parser = _parser()
    options = parser.parse_args(head)
    options.program = program
    if (options.command == "run") != bool(program):
        parser.error("the command of a job, and nothing else, must come after a -- that stands alone")
    try:
        check_machine()
        return int(options.function(options))
    except ClusterError as error:
        print(f"bin/cluster: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def up(options: argparse.Namespace) -> int:
    """Make the hosts, unless the same ones are there."""
    wanted = Cluster(name=options.name, hosts=options.hosts, rate=options.rate)
    with locked(options.name):
        there, found = read(options.name), parts(options.name)
        if there == wanted and found == wanted.parts():
            print(f"{options.name} is up already: {wanted}")
            return 0
        if there or found:
            state = str(there) if there and found == there.parts() else "a part of one"
            raise ClusterError(
                f"cluster {options.name} must be down before it is made as {wanted} (got {state}): "
                f"`bin/cluster down{_named(options)}` first"
            )
        make(wanted)
    names = ", ".join(wanted.host(index) for index in range(wanted.hosts))
    print(f"{options.name} is up: {names}; {_links(wanted)}")
    return 0


def down(options: argparse.Namespace) -> int:
    """Remove all hosts, also those of an `up` that did not finish."""
    with locked(options.name):
        found, ended = remove(options.name)
    hosts = sum(part.startswith("mpizero-") for part in found)
    text = (
        f"{options.name} is down: {hosts} host{'s' * (hosts != 1)} removed" if found else f"{options.name} was not up"
    )
    print(text + (f", {ended} processes ended" if ended else ""))
    return 0


def status(options: argparse.Namespace) -> int:
    """Show the hosts; the exit code is 2 where there are none or not all."""
    cluster = _found(options)
    print(f"{cluster.name} is up: {cluster}")
    print(f"{'host':<8} {'address':<12} {'sends at':<10} {'receives at':<12} processes")
    for index in range(cluster.hosts):
        sends, receives = rates(cluster, index)
        busy = len(processes(f"mpizero-{cluster.host(index)}"))
        print(f"{cluster.host(index):<8} {address(index):<12} {sends:<10} {receives:<12} {busy}")
    return 0


def start(options: argparse.Namespace) -> int:
    """Run a job over the hosts."""
    cluster = _found(options)
    counts = spread(cluster.hosts, options.ranks, options.per_host)
    return run(cluster, Job(ranks=place(counts, options.map), program=options.program, timeout=options.timeout))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="bin/cluster", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="up | run | status | down")

    def add(name: str, function: object, text: str, usage: str | None = None) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        made.set_defaults(function=function)
        made.add_argument("--name", type=cluster_name, default="mz", help="the cluster's, 1 to 6 small letters (mz)")
        return made

    command = add("up", up, "make the hosts; nothing is done where the same ones are there")
    command.add_argument("--hosts", type=host_count, default=2, metavar="N", help="how many, 1 to 32 (2)")
    text = "of each link in each direction: 1mbit to 100gbit, or none for links that are not shaped (1gbit)"
    command.add_argument("--rate", type=_rate, default="1gbit", help=text)
    command = add("run", start, "run a command in each of N ranks over the hosts", usage=RUN_USAGE)
    command.add_argument("-n", "--ranks", type=_count, metavar="N", help="number of ranks (all that --per-host gives)")
    text = "ranks on each host at most, or one number for each host, such as 3,2,1 (spread evenly)"
    command.add_argument("--per-host", type=_counts, metavar="M", help=text)
    text = "block fills host after host, round-robin takes them in turn (block)"
    command.add_argument("--map", choices=("block", "round-robin"), default="block", help=text)
    command.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="end the job after so long, with exit code 124"
    )
    add("status", status, "show hosts, addresses, rates and the number of processes")
    add("down", down, "remove the hosts, whatever still runs on them, and what an up that was killed has left")
    return parser


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Part the options from the command, which comes after the first -- that stands alone."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _found(options: argparse.Namespace) -> Cluster:
    cluster, found = read(options.name), parts(options.name)
    if cluster is None and not found:
        raise ClusterError(f"cluster {options.name} must be up (got none): `bin/cluster up{_named(options)}` first")
    if cluster is None or found != cluster.parts():
        missing = ", ".join(sorted(cluster.parts() - found)) if cluster else "its description"
        remedy = f"`bin/cluster down{_named(options)}` and `up` make it anew"
        raise ClusterError(f"cluster {options.name} must be whole ({missing or 'nothing'} is missing): {remedy}")
    return cluster


def _named(options: argparse.Namespace) -> str:
    return "" if options.name == "mz" else f" --name {options.name}"


def _links(cluster: Cluster) -> str:
    return "links are not shaped" if cluster.rate is None else f"links of {rate_text(cluster.rate)} each way"


def _refuse(rule: str, text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"must be {rule} (got {text!r})")


def cluster_name(text: str) -> str:
    """Return a cluster's name; raise ArgumentTypeError for what is none."""
    # No digits: host 0 of mz1 and host 10 of mz would be one.
    return text if re.fullmatch("[a-z]{1,6}", text) else _refuse("1 to 6 small letters", text)


def host_count(text: str) -> int:
    """Return a number of hosts; raise ArgumentTypeError for what is none."""
    return int(text) if _whole(text) and 1 <= int(text) <= 32 else _refuse("a whole number from 1 to 32", text)


def _rate(text: str) -> int | None:
    """Return bits per second, None for "none"."""
    if text == "none":
        return None
    found = re.fullmatch(rf"(\d{{1,9}}(?:\.\d{{1,9}})?)({'|'.join(UNITS)})", text)
    bits = round(float(found[1]) * UNITS[found[2]]) if found else 0
    return bits if RATES[0] <= bits <= RATES[1] else _refuse("none or 1mbit to 100gbit, such as 1gbit or 2.5gbit", text)


def _count(text: str) -> int:
    return int(text) if _whole(text) and int(text) else _refuse("a whole number, at least 1", text)


def _counts(text: str) -> list[int]:
    found = text.split(",")
    if not all(map(_whole, found)) or not any(map(int, found)):
        _refuse("one whole number, or one for each host such as 3,2,1", text)
    return list(map(int, found))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    return value if 0 < value < float("inf") else _refuse("a number of seconds above 0", text)


def _whole(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,6}", text))
