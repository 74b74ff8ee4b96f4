#!/bin/bash
# Make .venv-hpc in the checkout, with mpizero for a site:  hpc/install.sh SITE
# SITE is the name of a profile in hpc/site. Once, on a login node: the nodes of a job need no network then.
# EXTRAS are more of mpizero's extras, as cuda13 (or cuda12) for nodes with NVIDIA GPUs.
# PYTHON is the Python to start from (python3), of version 3.10 or newer.
set -u
# shellcheck source=hpc/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
root=$(dirname "$hpc")
venv=$root/.venv-hpc

[ $# = 1 ] || fail "a site must be given: hpc/install.sh SITE, one of $(sites)"
read_profile "$1"
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "Python must be 3.10 or newer (got $("$python" -V 2>&1)): load a module that has it, or set PYTHON"
set -e
echo "hpc/install.sh: making .venv-hpc; pip takes some minutes"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check -qq -c "$root/constraints.txt")
if [ "$build_mpi4py" = 1 ]; then
    MPICC=${MPICC:-mpicc} "${pip[@]}" --no-binary mpi4py mpi4py
fi
"${pip[@]}" -e "${root}[torch${extras:+,$extras}${EXTRAS:+,$EXTRAS}]"
echo "$1" >"$venv/site"
echo "hpc/install.sh: .venv-hpc is ready for site $1; submit a job: sbatch hpc/slurm/cpu.sbatch (see hpc/README.md)"
