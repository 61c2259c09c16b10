#!/usr/bin/env bash
# Train on several machines: start the same command on each. They meet at HOST:PORT on the first one.
#   launch/multi_node.sh NODES RANKS_PER_NODE HOST:PORT [a.b=c ...]
# Checkpoints need an output_dir that all machines share. JOB names the meeting if several use one port.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage='usage: launch/multi_node.sh NODES RANKS_PER_NODE HOST:PORT [a.b=c ...]'
nodes=${1:?$usage} ranks=${2:?$usage} endpoint=${3:?$usage}
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

run() {
    printf '+' && printf ' %q' "$@" && echo
    [[ -n ${DRY_RUN:-} ]] || exec "$@"
}

run "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$ranks" --rdzv-backend c10d \
    --rdzv-endpoint "$endpoint" --rdzv-id "${JOB:-megascale}" -m megascale.train "${@:4}"
