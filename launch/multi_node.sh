#!/usr/bin/env bash
# Train on several machines: start the same command on each. They meet at HOST:PORT on the first one.
#   launch/multi_node.sh NODES RANKS_PER_NODE HOST:PORT [--torchrun-option=value ...] [a.b=c ...]
# Checkpoints need an output_dir that all machines share. JOB names the meeting if several use one port. Options with two
# dashes go to torchrun: --max-restarts=3; --local-addr=IP where the others do not find this machine by its name;
# --rdzv-conf=is_host=1 on the first machine, =0 on the others, where it does not find out by itself that it is HOST.
# INTERFACE: the network interface for gloo and NCCL, such as eth1. Without it they take the one of the machine's name.
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE: see launch/elastic.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage='usage: launch/multi_node.sh NODES RANKS_PER_NODE HOST:PORT [--torchrun-option=value ...] [a.b=c ...]'
nodes=${1:?$usage} ranks=${2:?$usage} endpoint=${3:?$usage}
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

options=() program=() interface=()
for argument in "${@:4}"; do
    case $argument in
        --help | --version) program+=("$argument") ;;
        --*) options+=("$argument") ;;
        *) program+=("$argument") ;;
    esac
done
[[ -z ${INTERFACE:-} ]] || interface=(env "GLOO_SOCKET_IFNAME=$INTERFACE" "NCCL_SOCKET_IFNAME=$INTERFACE")
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

run() {
    printf '+' && printf ' %q' "$@" && echo
    [[ -n ${DRY_RUN:-} ]] || exec "$@"
}

run "${interface[@]}" "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${JOB:-megascale}" "${options[@]}" \
    -m megascale.train "${program[@]}"
