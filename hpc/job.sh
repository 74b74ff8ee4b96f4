#!/bin/bash
# Start a script in every rank of a job. The part that the job scripts of all batch systems share:
#
#     hpc/job.sh --nodes N --per-node M [--gpus] [--stop-after SECONDS] SCRIPT ARGUMENT ...
#
# It reads the site's profile, has `mpizero doctor` see that launcher and MPI library go together, and starts the ranks
# through hpc/bind.sh. SIGUSR1, which comes ahead of the end of the time, is handed on to the ranks; a Slurm job that
# ends well after it goes back into the queue.
#
# Variables that it listens to:
#   MPIZERO_SITE      a name in hpc/site; else the one that hpc/install.sh was given
#   MPIZERO_LAUNCHER  what starts the ranks, instead of the profile's: "srun --mpi=pmi2", mpirun, ...
#   MPIZERO_PYTHON    the Python to use, instead of the one that hpc/install.sh made
#   MPIZERO_BIND      for bind.sh: 0 does nothing, say tells what it did
set -u
# shellcheck source=hpc/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

whole() {
    case $2 in
    '' | *[!0-9]* | 0*) fail "$1 must be a whole number, at least 1 (got '$2')" ;;
    esac
}

nodes='' per_node='' gpus=0 stop_after=''
while [ $# -gt 0 ]; do
    case $1 in
    --nodes) nodes=${2-} && shift 2 ;;
    --per-node) per_node=${2-} && shift 2 ;;
    --stop-after) stop_after=${2-} && shift 2 ;;
    --gpus) gpus=1 && shift ;;
    *) break ;;
    esac || fail "$1 must be followed by a number"
done
whole --nodes "$nodes"
whole --per-node "$per_node"
[ -z "$stop_after" ] || whole --stop-after "$stop_after"
[ $# -gt 0 ] || fail "the script must be given: hpc/job.sh --nodes $nodes --per-node $per_node SCRIPT ARGUMENT ..."
ranks=$((nodes * per_node))

venv=$hpc/../.venv-hpc
site=${MPIZERO_SITE:-$(cat "$venv/site" 2>/dev/null)}
python=${MPIZERO_PYTHON:-$venv/bin/python}
[ -n "$site" ] || fail "the site must be known: run hpc/install.sh SITE on the login node first, or set MPIZERO_SITE"
read_profile "$site"
[ -x "$python" ] || fail "there must be a Python at $python: run hpc/install.sh $site on the login node first"
launcher=${MPIZERO_LAUNCHER:-$launcher}
# A wheel's mpirun lies beside its Python.
PATH=$(dirname "$python"):$PATH
export PATH PYTHONUNBUFFERED=1

"$python" -m mpizero doctor --launcher "$launcher" || exit 1

# Ahead of the line, into which Open MPI's launcher gets the names of what is set.
export MPIZERO_UNBOUND=1 MPIZERO_GPUS=$gpus MPIZERO_PER_NODE=$per_node
# Only a job that was started before has it: programs resume by it.
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || export MPIZERO_RESTART=$SLURM_RESTART_COUNT

# Binding is bind.sh's, the same everywhere, so the launchers' own is off.
read -r -a line <<<"$launcher $launcher_flags"
case $(basename "${line[0]}") in
srun)
    line+=(--nodes="$nodes" --ntasks="$ranks" --ntasks-per-node="$per_node" --cpu-bind=none --kill-on-bad-exit=1)
    # srun does not take it over from sbatch since Slurm 22.05.
    [ -z "${SLURM_CPUS_PER_TASK-}" ] || line+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    # Ranks of a node load each other's GPU memory, so each must see all its GPUs.
    [ "$gpus" = 0 ] || line+=(--gpu-bind=none)
    ;;
jsrun)
    # One resource set per node: ranks in several could not see each other's GPUs.
    line+=(--nrs "$nodes" --rs_per_host 1 --tasks_per_rs "$per_node" --cpu_per_rs ALL_CPUS --bind none)
    [ "$gpus" = 0 ] || line+=(--gpu_per_rs ALL_GPUS)
    ;;
flux)
    line+=(--nodes="$nodes" --tasks-per-node="$per_node" -o cpu-affinity=off -o gpu-affinity=off)
    [ "$gpus" = 0 ] || line+=(--gpus-per-node="$per_node")
    ;;
*)
    case $("${line[0]}" --version 2>&1) in
    *"Open MPI"* | *OpenRTE* | *"Spectrum MPI"* | *PRRTE*)
        line+=(-n "$ranks" --map-by "ppr:$per_node:node" --bind-to none)
        # Open MPI hands on its own variables alone.
        for name in $(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|LD_PRELOAD|TMPDIR|SLURM_TMPDIR|(MPIZERO|OMP|UCX|FI|CUDA)_.*|PYTHON.*)$'); do
            line+=(-x "$name")
        done
        ;;
    *"Intel(R) MPI"*) line+=(-n "$ranks" -ppn "$per_node") ;;
    *HYDRA*) line+=(-n "$ranks" -ppn "$per_node" -bind-to none) ;;
    *) line+=(-n "$ranks" --ppn "$per_node" --cpu-bind none) ;; # PALS
    esac
    ;;
esac
line+=("$hpc/bind.sh" "$python" "$@")

echo "hpc/job.sh: $ranks ranks on $nodes nodes, site $site: ${line[*]}"
"${line[@]}" &
child=$!
stopped=0
trap 'stopped=1; echo "hpc/job.sh: SIGUSR1 goes on to the ranks"; kill -USR1 "$child"' USR1
trap 'kill -TERM "$child"' TERM
timer=''
if [ -n "$stop_after" ]; then
    # A sleep that is left would keep the job's output open.
    (
        trap 'kill "$nap"' TERM
        sleep "$stop_after" &
        nap=$!
        wait "$nap" && kill -USR1 $$
    ) >/dev/null 2>&1 &
    timer=$!
fi
# A signal ends a wait, not what is waited for.
while wait "$child"; kill -0 "$child" 2>/dev/null; do :; done
wait "$child"
code=$?
[ -z "$timer" ] || kill "$timer" 2>/dev/null
if [ "$stopped" = 1 ] && [ "$code" = 0 ] && [ -n "${SLURM_JOB_ID-}" ]; then
    echo "hpc/job.sh: the ranks have stopped ahead of the time limit; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
