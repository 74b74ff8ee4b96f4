"""The hosts of bin/cluster: namespaces, links and their rates.

Host i of the cluster `mz` is the network namespace `mpizero-mz<i>`. Its interface `net0` is one end of a veth pair; the
other end, `mz-port<i>`, is a port of the bridge `mz-bridge`. Nothing else joins the bridge, which has no address: the
hosts reach each other alone, and several clusters may use the same addresses. Every name begins with the cluster's, so
that `down` finds what an `up` that was killed has left.

[Note: rates] A token bucket (`tc ... tbf`) at each end of a link shapes what leaves by that end: `net0` what a host
sends, the port what it receives. Frames of 1514 bytes carry 1448 of TCP's data, so that TCP reaches 0.956 of a rate.
The bucket holds 1 ms of the rate, and 80 kB at least: the kernel hands over up to 68 kB in one piece. A message shorter
than the bucket leaves an idle host at once; a smaller one costs rate (tried: 32 KiB at 1 Gbit/s gave 0.68 of it).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from _cluster_state import NETNS, PACKAGES, Cluster, ClusterError, address, describe, folder, tool

from mpizero.errors import must_be

INTERFACE = "net0"
GRACE = 3.0
"""Seconds that processes have to end by themselves after they were asked to."""

# Nothing listens on a new host: a refusal is an answer.
PROBE = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=5)
except ConnectionRefusedError:
    print(socket.gethostname())
"""


def check_machine() -> None:
    """Refuse a user who may not make hosts, and a machine that lacks the tools."""
    if sys.platform != "linux":
        raise ClusterError(must_be("the system", "Linux, which has network namespaces", sys.platform))
    if os.geteuid() != 0:
        remedy = "network namespaces and the rates of links are root's to make, start it with sudo"
        raise ClusterError(must_be("the user of bin/cluster", "root", f"user id {os.geteuid()}", remedy))
    for program in PACKAGES:
        tool(program)


def parts(name: str) -> set[str]:
    """Return the names of a cluster's namespaces, bridge and ports that exist."""
    links = {link for _, link in socket.if_nameindex() if re.fullmatch(rf"{name}-(bridge|port\d+)", link)}
    found = NETNS.iterdir() if NETNS.is_dir() else iter(())
    return links | {path.name for path in found if re.fullmatch(rf"mpizero-{name}\d+", path.name)}


def make(cluster: Cluster) -> None:
    """Make all hosts and see that they reach each other; on an error nothing stays.

    Raises:
        ClusterError: with the command that failed, what it said and what may help.
    """
    try:
        describe(cluster)
        _command("ip", "link", "add", f"{cluster.name}-bridge", "type", "bridge")
        _command("ip", "link", "set", f"{cluster.name}-bridge", "up")
        for index in range(cluster.hosts):
            _make_host(cluster, index)
        for index in range(cluster.hosts):
            _check_host(cluster, index)
    except BaseException:
        remove(cluster.name)
        raise


def remove(name: str) -> tuple[set[str], int]:
    """Remove all that carries a cluster's name; return the parts that were there and the number of processes ended."""
    found = parts(name)
    namespaces = {part for part in found if part.startswith("mpizero-")}
    ended = end([pid for namespace in namespaces for pid in processes(namespace)])
    for link in found - namespaces:
        # A bridge's port goes with its other end, and either may be gone by now.
        _try("ip", "link", "delete", link)
    for namespace in namespaces:
        _try("ip", "netns", "delete", namespace)
        (NETNS / namespace).unlink(missing_ok=True)
    shutil.rmtree(folder(name), ignore_errors=True)
    left = parts(name)
    if left:
        raise ClusterError(f"{', '.join(sorted(left))} could not be removed: see `ip link` and `ip netns`")
    return found, ended


def processes(namespace: str) -> list[int]:
    """Return the processes in a namespace."""
    return [int(pid) for pid in _try("ip", "netns", "pids", namespace).split()]


def end(pids: list[int]) -> int:
    """End processes, politely and then by force; return how many there were."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in filter(_lives, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + GRACE
        while any(map(_lives, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
    return len(pids)


def rates(cluster: Cluster, index: int) -> tuple[str, str]:
    """Return what tc says of the rates at which a host sends and receives."""
    shown = (
        _try("tc", "-n", f"mpizero-{cluster.host(index)}", "qdisc", "show", "dev", INTERFACE),
        _try("tc", "qdisc", "show", "dev", f"{cluster.name}-port{index}"),
    )
    found = [re.search(r"tbf .*?rate (\S+)", text) for text in shown]
    sends, receives = (rate.group(1) if rate else "unshaped" for rate in found)
    return sends, receives


def _make_host(cluster: Cluster, index: int) -> None:
    namespace, port = f"mpizero-{cluster.host(index)}", f"{cluster.name}-port{index}"
    _command("ip", "netns", "add", namespace)
    _command("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
    _command("ip", "link", "set", port, "master", f"{cluster.name}-bridge", "up")
    _command("ip", "-n", namespace, "link", "set", "lo", "up")
    _command("ip", "-n", namespace, "address", "add", f"{address(index)}/24", "dev", INTERFACE)
    _command("ip", "-n", namespace, "link", "set", INTERFACE, "up")
    if cluster.rate is not None:
        # See [Note: rates]. A queue of 50 ms is what small switches have.
        burst = max(80_000, cluster.rate // 8 // 1000)
        shape = ["root", "tbf", "rate", f"{cluster.rate}bit", "burst", f"{burst}b", "latency", "50ms"]
        _command("tc", "qdisc", "add", "dev", port, *shape)
        _command("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, *shape)


def _check_host(cluster: Cluster, index: int) -> None:
    """See that a host can be entered, has its name, and reaches the first one."""
    line = [str(folder(cluster.name) / "agent"), cluster.host(index)]
    done = _call([*line, shlex.join([sys.executable, "-I", "-S", "-c", PROBE, address(0)])])
    if done.returncode or done.stdout.strip() != cluster.host(index):
        said = (done.stderr.strip() or "no error").splitlines()[-1]
        remedy = "a container needs CAP_SYS_ADMIN, and a firewall may keep packets from crossing a bridge"
        raise ClusterError(f"host {cluster.host(index)} was made but cannot be used ({said}): {remedy}")


def _command(program: str, *words: str) -> None:
    """Run ip or tc.

    Raises:
        ClusterError: where it fails.
    """
    done = _call([tool(program), *words])
    if done.returncode == 0:
        return
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    remedy = "root of a container needs CAP_NET_ADMIN and CAP_SYS_ADMIN to make hosts (docker run --privileged)"
    if program == "tc":
        remedy = "the kernel may lack its module sch_tbf, --rate none does without"
    raise ClusterError(f"`{' '.join([program, *words])}` failed ({said}): {remedy}")


def _try(program: str, *words: str) -> str:
    """Return what ip or tc prints, "" where it fails."""
    done = _call([tool(program), *words])
    return done.stdout if done.returncode == 0 else ""


def _call(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _lives(pid: int) -> bool:
    """Return whether a process is there; one that is dead but not yet reaped is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
