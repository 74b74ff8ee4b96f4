#!/bin/bash
# Train on GPU nodes, a rank per GPU:  flux batch hpc/flux/gpu.flux [SCRIPT ARGUMENT ...]   (from the checkout's folder)
#
#flux: --job-name=mpizero
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=30m
#flux: --output=flux-{{id}}.out

[ -x hpc/job.sh ] || { echo "gpu.flux must be submitted from the checkout's folder (got $PWD)" >&2 && exit 2; }
[ $# -gt 0 ] || set -- examples/train_gpt.py --device cuda --save "runs/$(flux getattr jobid)"
nodes=$(flux resource list -n -o '{nnodes}' | head -1)
# Five minutes less than the limit: the ranks save and end.
MPIZERO_LAUNCHER=${MPIZERO_LAUNCHER:-flux run} exec hpc/job.sh --gpus --nodes "$nodes" --per-node 4 --stop-after 1500 "$@"
