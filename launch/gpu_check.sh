#!/usr/bin/env bash
# The checks that need a GPU: tests/gpu, then the benchmarks; tables and rounds go to a folder. Under 9 minutes.
# Needs torch >= 2.11 with its triton, numpy, pytest and hypothesis, and no network.
#   launch/gpu_check.sh [FOLDER]     FOLDER: where the tables go; default: benchmarks/results
# Every part has a time limit of its own. One that fails does not stop the next; the exit status is 1 then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${1:-benchmarks/results}
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
mkdir -p "$out" || exit 1
failed=()

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    printf '\n=== %s\n+ %s\n' "$name" "$*"
    PYTHONPATH=. timeout --kill-after=5 "$limit" "$@" || status=$?
    if [[ $status == 0 ]]; then
        printf '=== %s: passed in %d s\n' "$name" $((SECONDS - start))
    elif [[ $status == 124 || $status == 137 ]]; then
        printf '=== %s: FAILED, stopped after its limit of %d s\n' "$name" "$limit"
        failed+=("$name")
    else
        printf '=== %s: FAILED with status %d after %d s\n' "$name" "$status" $((SECONDS - start))
        failed+=("$name")
    fi
}

command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
PYTHONPATH=. "$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("launch/gpu_check.sh: no GPU here"); print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())' || exit 1

rm -f "$out"/{step,graph,kernels,offload}_gpu*  # an earlier run's must not pass for this one's

# Without addopts: --strict-config refuses the settings of pytest-timeout where that is not installed.
part "native.c" 120 "$python" megascale/kernels/native/levels.py
part "tests" 240 "$python" -m pytest tests/gpu -q -o addopts=-ra
part "step" 120 "$python" benchmarks/step.py --numel 400000000 --tensors 300 --rounds 12 --device cuda \
    --backends triton,torch --out "$out/step_gpu.md"
part "kernels" 80 "$python" benchmarks/kernels.py --out "$out/kernels_gpu.md"
part "graph" 50 "$python" benchmarks/graph.py --backends triton --out "$out/graph_gpu.md"
part "offload" 120 "$python" benchmarks/offload.py --numel 1000000000 --width 8192 --tokens 32768 --seconds 80 \
    --out "$out/offload_gpu.md"

if ((${#failed[@]})); then
    printf '\nfailed: %s\n' "${failed[*]}"
    exit 1
fi
printf '\nall parts passed\n'
