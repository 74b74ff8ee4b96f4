"""Make a Slurm cluster of this machine, for job scripts to be tried on: hosts of bin/cluster with Slurm's daemons.

The daemons are Debian's, with configuration, keys, state and logs in a folder of their own, and gone after `down`. They
use no file of a Slurm that is installed here, and no cgroup: processes are found by their parents.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _cluster import INTERRUPTED, cluster_name, host_count, split
from _cluster_job import DEFAULTS, OUTER_JOB
from _cluster_net import INTERFACE, check_machine, make, parts, remove
from _cluster_state import Cluster, ClusterError, address, folder, locked, read

from mpizero.errors import must_be

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXAMPLES = """\
examples (as root):
  bin/slurm up
  bin/slurm run -- sbatch --wait hpc/slurm/cpu.sbatch
  bin/slurm run -- sinfo
  bin/slurm down
"""
BAD_USAGE = 2
HOW_TO_INSTALL = "install it: `apt-get install --no-install-recommends slurm-wlm munge` on Debian and Ubuntu"
DAEMONS = ("munged", "slurmctld", "slurmd")
PATIENCE = 20.0
"""Seconds in which the daemons have to be there."""

# cred_expire is how long a job that is put back into the queue waits, too: 120 s by default.
CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={first}({first_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
GresTypes=gpu
KillWait=5
ReturnToService=2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, the command's, or 2 for what cannot be done.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    words, program = split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    options = parser.parse_args(words)
    options.program = program
    if (options.command == "run") != bool(options.program):
        parser.error("the command to run, and nothing else, must come after a -- that stands alone")
    try:
        check_machine()
        return int(options.function(options))
    except ClusterError as error:
        print(f"bin/slurm: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def up(options: argparse.Namespace) -> int:
    """Make the hosts and start the daemons, unless they are there."""
    for program in DAEMONS:
        tool(program)
    cluster = Cluster(name=options.name, hosts=options.hosts, rate=None)
    with locked(options.name):
        if _home(cluster).is_dir() and read(options.name) == cluster and parts(options.name) == cluster.parts():
            print(f"{options.name} is up already: {cluster}")
            return 0
        if parts(options.name):
            remedy = f"`bin/slurm down --name {options.name}` first"
            raise ClusterError(must_be(f"cluster {options.name}", "down, before Slurm is started", "up", remedy))
        refuse_beside_another()
        make(cluster)
        try:
            write(cluster, cpus=options.cpus, gpus=options.gpus)
            _start(cluster)
            _await(cluster)
        except BaseException:
            remove(options.name)
            raise
    names = ", ".join(cluster.host(index) for index in range(cluster.hosts))
    print(f"{options.name} is up: Slurm on {names}, {options.cpus} ranks each; `bin/slurm run -- sinfo`")
    return 0


def down(options: argparse.Namespace) -> int:
    """End the daemons and all jobs, and remove the hosts."""
    with locked(options.name):
        found, _ = remove(options.name)
    print(f"{options.name} is down" if found else f"{options.name} was not up")
    return 0


def run(options: argparse.Namespace) -> int:
    """Run a command on the first host, as on a login node."""
    cluster = read(options.name)
    if cluster is None or not _home(cluster).is_dir():
        raise ClusterError(must_be(f"Slurm of {options.name}", "up", "down", f"`bin/slurm up --name {options.name}`"))
    return int(_inside(cluster, 0, options.program).returncode)


def environment(variables: Mapping[str, str], cluster: Cluster) -> dict[str, str]:
    """Return the environment of a command on the login node.

    Args:
        variables: this process's; what an outer job said about itself is left out.
        cluster: whose Slurm is meant.
    """
    outer = ("SLURM_", "SBATCH_", *OUTER_JOB)
    kept = {name: value for name, value in variables.items() if not name.startswith(outer)}
    # Hosts reach each other by one interface alone, and everybody here is root.
    own = {"OMPI_MCA_btl_tcp_if_include": INTERFACE, "SLURM_CONF": str(_home(cluster) / "slurm.conf")}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**DEFAULTS, **kept, **own, **root}


def tool(program: str) -> str:
    """Return the path of one of Slurm's programs or daemons.

    Raises:
        ClusterError: where it is not installed.
    """
    path = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if path is None:
        raise ClusterError(must_be(f"the program {program}", "installed", "none", HOW_TO_INSTALL))
    return path


def refuse_beside_another(proc: Path = Path("/proc")) -> None:
    """Refuse a machine on which a Slurm runs that is not ours: it may hand out the same cores.

    Raises:
        ClusterError: with its process.
    """
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        program = Path(os.fsdecode(words[0])).name
        if re.match(r"slurm(ctld|d|dbd)\b", program) and not any(b"mpizero-cluster" in word for word in words):
            remedy = "job scripts can be tried on that one"
            found = f"{program}, process {path.parent.name}"
            raise ClusterError(must_be("this machine", "one without a Slurm of its own", found, remedy))


def write(cluster: Cluster, *, cpus: int, gpus: int) -> None:
    """Write configuration and key into the cluster's folder.

    Args:
        cluster: its hosts.
        cpus: how many cores each host pretends to have.
        gpus: how many GPUs each host pretends to have.
    """
    home = _home(cluster)
    for name in ("", "state", *(f"spool-{cluster.host(index)}" for index in range(cluster.hosts))):
        (home / name).mkdir(mode=0o700)
    key = home / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(64))
    words = {"name": cluster.name, "first": cluster.host(0), "first_address": address(0), "folder": home}
    lines = [CONFIGURATION.format(**words)]
    lines += [
        f"NodeName={cluster.host(index)} NodeAddr={address(index)} CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN\n"
        for index in range(cluster.hosts)
    ]
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
    (home / "slurm.conf").write_text("".join(lines))
    for number in range(gpus):
        (home / f"gpu{number}").touch()
    (home / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={home}/gpu[0-{gpus - 1}]\n")
    (home / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _start(cluster: Cluster) -> None:
    home = _home(cluster)
    munge = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
    munge |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    # munged would rather have the socket in a folder that all may enter; here everybody is root.
    words = [f"--{name}={home / file}" for name, file in munge.items()]
    _call(cluster, 0, [tool("munged"), "--force", *words])
    _call(cluster, 0, [tool("slurmctld"), "-f", str(home / "slurm.conf")])
    for index in range(cluster.hosts):
        _call(cluster, index, [tool("slurmd"), "-f", str(home / "slurm.conf"), "-N", cluster.host(index)])


def _await(cluster: Cluster) -> None:
    """Wait until Slurm would start a job on every host."""
    deadline = time.monotonic() + PATIENCE
    said = ""
    while time.monotonic() < deadline:
        line = [tool("sinfo"), "--noheader", "--Node", "--format=%T"]
        done = _inside(cluster, 0, line, capture_output=True, text=True)
        if done.stdout.split() == ["idle"] * cluster.hosts:
            return
        said = " ".join((done.stdout + done.stderr).split())
        time.sleep(0.1)
    logs = "\n".join(path.read_text()[-1000:] for path in _home(cluster).glob("*.log"))
    raise ClusterError(f"Slurm's daemons did not come within {PATIENCE:g} s ({said}); their logs:\n{logs}")


def _call(cluster: Cluster, index: int, line: list[str]) -> None:
    done = _inside(cluster, index, line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"`{shlex.join(line)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _inside(cluster: Cluster, index: int, line: Sequence[str], **how: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command on a host."""
    words = [str(folder(cluster.name) / "agent"), cluster.host(index), f"exec {shlex.join(line)}"]
    return subprocess.run(words, env=environment(os.environ, cluster), check=False, **how)


def _home(cluster: Cluster) -> Path:
    return folder(cluster.name) / "slurm"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="bin/slurm", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="up | run | down")

    def add(name: str, function: object, text: str, usage: str | None = None) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        made.set_defaults(function=function)
        made.add_argument(
            "--name", type=cluster_name, default="slurm", help="the cluster's, 1 to 6 small letters (slurm)"
        )
        return made

    command = add("up", up, "make the hosts and start Slurm on them; nothing is done where the same ones are there")
    command.add_argument("--hosts", type=host_count, default=2, metavar="N", help="how many, 1 to 32 (2)")
    command.add_argument("--cpus", type=host_count, default=4, metavar="N", help="ranks that each host takes (4)")
    text = "GPUs that each host pretends to have, for job scripts to be tried (4)"
    command.add_argument("--gpus", type=host_count, default=4, metavar="N", help=text)
    add("run", run, "run a command on the first host, as on a login node", "bin/slurm run [--name NAME] -- COMMAND ...")
    add("down", down, "end all jobs and daemons and remove the hosts")
    return parser
