#!/usr/bin/env bash
# Train on this machine.
#   launch/one_node.sh RANKS [a.b=c ...]        launch/one_node.sh 2 task=text optimizer.sharded=true
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${1:?usage: launch/one_node.sh RANKS [a.b=c ...]}
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

run() {
    printf '+' && printf ' %q' "$@" && echo
    [[ -n ${DRY_RUN:-} ]] || exec "$@"
}

run "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m megascale.train "${@:2}"
