#!/bin/bash
# Give this rank its share of the node, then become the program:  mpirun ... hpc/bind.sh python train.py
#
# GPU: that of the rank's number on its node, counted in the order of PCI addresses, which CUDA is told to follow too.
# None is hidden, since ranks load each other's GPU memory: `mz.choose_gpu()` takes the same one.
# Card: with MPIZERO_BIND_CARD=ucx, of several active ones the nearest to the GPU (by PCI, else by NUMA node).
# Cores: an even share of those that the GPU's NUMA node has, or without GPUs of all, hardware threads of a core
# together. Only under hpc/job.sh, which has switched off the launchers' own binding (MPIZERO_UNBOUND=1).
# SIGUSR1: held back until the program's first `mz.stop_requested()`, ahead of which it would end the rank.
#
# Nothing is done that cannot be found out. MPIZERO_BIND=say tells on stderr what was; MPIZERO_BIND=0 does nothing.
# MPIZERO_SYS is where to look instead of /sys, for tests.
set -u
[ $# -gt 0 ] || { echo "bind.sh: the program must be given: bind.sh PROGRAM ARGUMENT ..." >&2 && exit 2; }
[ "${MPIZERO_BIND-}" != 0 ] || exec "$@"
sys=${MPIZERO_SYS:-/sys}
shopt -s nullglob

# first NAME ...: the value of the first variable that holds a number, without what comes behind it ("4(x2)").
first() {
    local name value
    for name; do
        value=${!name-}
        value=${value%%[!0-9]*}
        [ -z "$value" ] || { echo "$value" && return; }
    done
}

# mpirun's and its like before Slurm's: a batch script has SLURM_LOCALID=0, and mpirun's ranks inherit it.
slurm_rank=${SLURM_STEP_NUM_TASKS:+SLURM_LOCALID}
# shellcheck disable=SC2086  # none is no name
rank=$(first OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID MV2_COMM_WORLD_LOCAL_RANK PMI_LOCAL_RANK PALS_LOCAL_RANKID \
    JSM_NAMESPACE_LOCAL_RANK FLUX_TASK_LOCAL_ID $slurm_rank)
size=$(first MPIZERO_PER_NODE OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS MV2_COMM_WORLD_LOCAL_SIZE PMI_LOCAL_SIZE \
    PALS_LOCAL_SIZE JSM_NAMESPACE_LOCAL_SIZE SLURM_STEP_TASKS_PER_NODE)
size=${size:-1}

# expand 0-2,5: one number a line.
expand() {
    local part parts
    IFS=, read -r -a parts <<<"$1"
    for part in ${parts[@]+"${parts[@]}"}; do
        seq "${part%-*}" "${part#*-}"
    done
}

# gpus: the PCI addresses of the GPUs that this process may use, in order.
gpus() {
    local found device vendor class
    if [ "$sys" = /sys ] && found=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null); then
        # It says 00000000:0A:00.0, the kernel 0000:0a:00.0.
        echo "$found" | tr '[:upper:]' '[:lower:]' | sed 's/^0000\([0-9a-f]\{4\}:\)/\1/' | sort
        return
    fi
    for device in "$sys"/bus/pci/devices/*; do
        read -r vendor <"$device/vendor"
        read -r class <"$device/class"
        case $vendor$class in
        0x10de0x030[02]*) basename "$device" ;;
        esac
    done
}

# node_of DEVICE: the NUMA node, nothing where the kernel does not know (-1).
node_of() {
    local node=''
    read -r node 2>/dev/null <"$1/numa_node"
    [ "$node" = -1 ] || echo "$node"
}

# gpu_of RANK: the PCI address of its GPU, nothing without GPUs.
gpu_of() {
    [ ${#all_gpus[@]} = 0 ] || echo "${all_gpus[$1 % ${#all_gpus[@]}]}"
}

# near A B: how many steps of their paths in the PCI tree two devices share.
near() {
    local a b count=0
    IFS=/ read -r -a a <<<"$(realpath "$1")"
    IFS=/ read -r -a b <<<"$(realpath "$2")"
    while [ "$count" -lt ${#a[@]} ] && [ "${a[$count]}" = "${b[$count]-}" ]; do count=$((count + 1)); done
    echo "$count"
}

# card: the active card that is nearest to this rank, of several equal ones that of its number.
card() {
    local port name close state best=-1 cards=() from=$sys/bus/pci/devices/$gpu
    for port in "$sys"/class/infiniband/*/ports/1; do
        read -r state 2>/dev/null <"$port/state" || continue
        [[ $state == *ACTIVE* ]] || continue
        name=${port%/ports/1}
        close=0
        if [ -n "$gpu" ]; then
            close=$(near "$from" "$name/device")
            [ "$(node_of "$from")" != "$(node_of "$name/device")" ] || close=$((close + 1))
        fi
        [ "$close" -le "$best" ] || cards=()
        [ "$close" -lt "$best" ] || { best=$close && cards+=("$(basename "$name")"); }
        active=$((active + 1))
    done
    [ ${#cards[@]} = 0 ] || nearest=${cards[$rank % ${#cards[@]}]}
}

# cores: the hardware threads that this rank may have, as a list for taskset; nothing where there is nothing to choose.
cores() {
    local allowed wanted cpu key i node peer peers=0 mine=0 sorted=()
    allowed=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "${MPIZERO_STATUS:-/proc/self/status}")
    wanted=$allowed
    node=${gpu:+$(node_of "$sys/bus/pci/devices/$gpu")}
    if [ -n "$node" ]; then
        read -r wanted <"$sys/devices/system/node/node$node/cpulist" || return
    fi
    for ((i = 0; i < size; i++)); do
        peer=$(gpu_of "$i")
        [ "$node" = "${peer:+$(node_of "$sys/bus/pci/devices/$peer")}" ] || continue
        [ "$i" -ge "$rank" ] || mine=$((mine + 1))
        peers=$((peers + 1))
    done
    while read -r cpu; do
        # Threads of a core have the same list of siblings, whose first number puts them together.
        read -r key 2>/dev/null <"$sys/devices/system/cpu/cpu$cpu/topology/thread_siblings_list" || key=$cpu
        sorted+=("${key%%[!0-9]*} $cpu")
    done < <(comm -12 <(expand "$allowed" | sort) <(expand "$wanted" | sort))
    [ ${#sorted[@]} -ge "$peers" ] && [ "$peers" -gt 0 ] || return
    mapfile -t sorted < <(printf '%s\n' "${sorted[@]}" | sort -n -k1 -k2 | cut -d' ' -f2)
    i=$((mine * ${#sorted[@]} / peers))
    printf '%s\n' "${sorted[@]:i:((mine + 1) * ${#sorted[@]} / peers) - i}" | sort -n | paste -sd,
}

if [ -z "$rank" ]; then
    [ "${MPIZERO_BIND-}" != say ] || echo "bind.sh: no launcher says which rank of its node this is: nothing done" >&2
    exec "$@"
fi
mapfile -t all_gpus < <(gpus)
if [ -n "${CUDA_VISIBLE_DEVICES-}" ]; then
    # Numbers in the same order, or names of which the address is not known.
    IFS=, read -r -a visible <<<"$CUDA_VISIBLE_DEVICES"
    for i in "${!visible[@]}"; do
        [[ ${visible[$i]} == *[!0-9]* ]] || visible[i]=${all_gpus[${visible[$i]}]-${visible[$i]}}
    done
    all_gpus=("${visible[@]}")
fi
gpu=$(gpu_of "$rank")
said=''
if [ -n "$gpu" ]; then
    export CUDA_DEVICE_ORDER=PCI_BUS_ID
    said+=", GPU $((rank % ${#all_gpus[@]})) of ${#all_gpus[@]} ($gpu)"
fi
if [ "${MPIZERO_GPUS-0}" = 1 ] && [ "$rank" = 0 ] && [ ${#all_gpus[@]} -lt "$size" ]; then
    echo "bind.sh: $size ranks on $(uname -n) see ${#all_gpus[@]} GPUs, one for each is needed: ask for as many GPUs per" \
        "node as ranks (Slurm: --gpus-per-node=$size; PBS: ngpus=$size; LSF: -gpu num=$size), or start fewer ranks" >&2
    [ ${#all_gpus[@]} -gt 0 ] || exit 1
fi
active=0 nearest=''
card
if [ "$active" -gt 1 ] && [ "${MPIZERO_BIND_CARD-}" = ucx ] && [ -z "${UCX_NET_DEVICES-}" ]; then
    export UCX_NET_DEVICES=$nearest:1
    said+=", card $nearest of $active"
fi
run=()
if [ "${MPIZERO_UNBOUND-0}" = 1 ] && command -v taskset >/dev/null; then
    list=$(cores)
    [ -z "$list" ] || { run=(taskset -c "$list") && said+=", cores $list"; }
fi
[ "${MPIZERO_BIND-}" != say ] || echo "bind.sh: rank $rank of $size on $(uname -n)${said:-: nothing to choose}" >&2
# Older systems' env lacks the option.
hold='import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); os.execvp(sys.argv[1], sys.argv[1:])'
if env --block-signal=USR1 true 2>/dev/null; then
    run+=(env --block-signal=USR1)
elif command -v python3 >/dev/null; then
    run+=(python3 -I -S -c "$hold")
fi
exec "${run[@]}" "$@"
