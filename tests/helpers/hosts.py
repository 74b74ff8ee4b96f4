"""Whether hosts can be made of namespaces here, for the tests that need several."""

import os
import shutil
import subprocess
import sys

PARTS = "ip link add br0 type bridge && ip link add ve0 type veth peer name ve1 && tc qdisc add dev ve0 root tbf"


def why_not(*more):
    """Return why no hosts can be had here, "" where they can; all that is tried goes with its namespace.

    Args:
        more: programs that are needed beside those that make hosts.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root of a Linux"
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    programs = ("ip", "tc", "nsenter", "unshare", "mount", *more)
    missing = [program for program in programs if not shutil.which(program, path=folders)]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux{', slurm-wlm, munge' if more else ''})"
    line = ["unshare", "--net", "--uts", "--mount", "sh", "-c", f"{PARTS} rate 1gbit burst 100kb latency 50ms"]
    tried = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    if tried.returncode:
        return f"no namespaces, bridges, veth or tbf here: {tried.stderr.strip()}"
    return ""
