#!/usr/bin/env bash
# Train on a changing number of machines: start the same command on each, then or later. When one is lost, or one joins,
# all ranks start again together and resume from the latest checkpoint.
#   launch/elastic.sh MIN:MAX RANKS_PER_NODE HOST:PORT [a.b=c ...]
# HOST must stay. batch_size must be a multiple of every number of ranks that may come about; the data order and the
# global batch stay the same. Set checkpoint.every to the number of steps that you can afford to lose.
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives each start a store of its own. Without it torchrun hands the new ranks the store
# of the old ones, where the first to come reads dead addresses (https://github.com/pytorch/pytorch/issues/135712). Set it
# for any torchrun with --max-restarts.
# RESTARTS: how many failures to survive (default 10).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage='usage: launch/elastic.sh MIN:MAX RANKS_PER_NODE HOST:PORT [a.b=c ...]'
nodes=${1:?$usage} ranks=${2:?$usage} endpoint=${3:?$usage}
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

run() {
    printf '+' && printf ' %q' "$@" && echo
    [[ -n ${DRY_RUN:-} ]] || exec "$@"
}

run "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-10}" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${JOB:-megascale}" -m megascale.train "${@:4}"
