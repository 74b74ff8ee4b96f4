"""What bin/cluster knows of its hosts: their description, the folder it lies in, the script that enters a host.

Standard library only, as all of bin/cluster: it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.errors import MpiZeroError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION = 1
NETNS = Path("/var/run/netns")
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3}

# Called as an ssh is: a host, then the words of a shell's command line. Where no mount is allowed, hosts do without
# names for addresses; Open MPI needs none.
AGENT = """\
#!/bin/sh
host=$1
shift
exec {nsenter} --net={netns}/mpizero-"$host" {unshare} --uts --mount sh -c '
    echo "$0" > /proc/sys/kernel/hostname || exit 1
    {mount} --bind {hosts} /etc/hosts 2> /dev/null
    exec sh -c "$1"
' "$host" "$*"
"""


class ClusterError(MpiZeroError):
    """Say that hosts cannot be made, used or removed; the text says what to do."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Describe the hosts that `up` makes."""

    name: str
    """1 to 6 letters: with the longest ending it fits the 15 characters of an interface's name."""
    hosts: int
    """How many, at most 32."""
    rate: int | None
    """Bits per second of each link in each direction; None for links that are not shaped."""

    def host(self, index: int) -> str:
        """Return a host's name."""
        return f"{self.name}{index}"

    def parts(self) -> set[str]:
        """Return the names of all namespaces, bridges and ports of the bridge."""
        namespaces = {f"mpizero-{self.host(index)}" for index in range(self.hosts)}
        return namespaces | {f"{self.name}-port{index}" for index in range(self.hosts)} | {f"{self.name}-bridge"}

    def __str__(self) -> str:
        """Return number of hosts and rate for a message."""
        return f"{self.hosts} host{'s' * (self.hosts > 1)}, --rate {rate_text(self.rate)}"


def address(index: int) -> str:
    """Return the address of a host."""
    return f"10.77.0.{index + 1}"


def rate_text(rate: int | None) -> str:
    """Return a rate as the command line has it."""
    if rate is None:
        return "none"
    unit = next(unit for unit, bits in UNITS.items() if rate >= bits)
    return f"{rate / UNITS[unit]:g}{unit}"


def tool(program: str) -> str:
    """Return the path of a program; sudo and cron may leave out the folders of root's."""
    path = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if path is None:
        raise ClusterError(f"bin/cluster needs the program {program}: install the package {PACKAGES[program]}")
    return path


def folder(name: str) -> Path:
    """Return where a cluster's description and agent lie; it need not exist."""
    base = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
    return base / "mpizero-cluster" / name


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep two commands from making or removing hosts at once."""
    base = folder(name).parent
    base.mkdir(mode=0o700, exist_ok=True)
    # Root runs a script that lies in it.
    if base.is_symlink() or base.stat().st_uid != os.geteuid():
        raise ClusterError(must_be(str(base), "a folder of root's", f"user id {base.stat().st_uid}", "remove it"))
    with (base / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read(name: str) -> Cluster | None:
    """Return the cluster that `up` was last asked for; None where there is none."""
    path = folder(name) / "cluster.json"
    try:
        stored = json.loads(path.read_text())
        if stored.pop("schema_version") == SCHEMA_VERSION:
            return Cluster(**stored)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    raise ClusterError(f"{path} must be what `bin/cluster up` wrote: remove the hosts by `bin/cluster down`")


def describe(cluster: Cluster) -> None:
    """Write a cluster's description, its table of host names and its agent into its folder."""
    place = folder(cluster.name)
    place.mkdir(mode=0o700, exist_ok=True)
    (place / "cluster.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(cluster)}) + "\n")
    lines = [f"{address(index)} {cluster.host(index)}" for index in range(cluster.hosts)]
    (place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    paths = {program: shlex.quote(tool(program)) for program in ("nsenter", "unshare", "mount")}
    (place / "agent").write_text(AGENT.format(netns=NETNS, hosts=place / "hosts", **paths))
    (place / "agent").chmod(0o700)
