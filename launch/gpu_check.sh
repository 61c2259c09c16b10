#!/usr/bin/env bash
# The checks that need a GPU: tests/gpu, then the benchmarks; tables go to benchmarks/results/. Under 9 minutes.
#   launch/gpu_check.sh [FOLDER]     FOLDER: where the tables go
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"

run() {
    printf '+ %s\n' "$*"
    PYTHONPATH=. "$@"
}

run "$python" -c 'import torch; assert torch.cuda.is_available(), "no GPU here"; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
command -v nvidia-smi > /dev/null && run nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
run timeout 240 "$python" -m pytest tests/gpu -q
run timeout 280 "$python" benchmarks/step.py --numel 1000000000 --tensors 1000 --rounds 20 --out "$out/step_gpu.md"
