#!/usr/bin/env bash
# The checks that need a GPU, in five parts of under 9 minutes each. Each program writes its table as soon as it has it.
# Needs torch >= 2.11 with its triton, numpy, pytest and hypothesis, and no network.
#   launch/gpu_check.sh [PART...] [--out FOLDER]     of: nccl loop offload codes tables; default: all, in this order
#   nccl     every collective of a step on NCCL: one rank, without the short cuts of one rank
#   loop     training with the host running ahead, beside torch.amp and the 8-bit optimizers that are installed
#   offload  main params and state in host memory, and the update alone in the ways that may explain its time
#   codes    the update of 8-bit moments by its limit of registers
#   tables   tests/gpu, and the tables that are known: a step, the kernels, graphs
# Every program has a time limit of its own. One that fails does not stop the next; the exit status is 1 then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
parts=() out=benchmarks/results
while (($#)); do
    case $1 in
        --out) out=${2:?"--out needs a folder"} && shift ;;
        nccl | loop | offload | codes | tables) parts+=("$1") ;;
        *) echo "launch/gpu_check.sh: no part $1; they are: nccl loop offload codes tables" >&2 && exit 2 ;;
    esac
    shift
done
((${#parts[@]})) || parts=(nccl loop offload codes tables)
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
mkdir -p "$out" || exit 1
failed=()

run() { # run NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    printf '\n=== %s\n+ %s\n' "$name" "$*"
    PYTHONPATH=. timeout --kill-after=5 "$limit" "$@" || status=$?
    if [[ $status == 0 ]]; then
        printf '=== %s: passed in %d s\n' "$name" $((SECONDS - start))
    else
        [[ $status == 124 || $status == 137 ]] && status="$status, stopped after its limit of $limit s"
        printf '=== %s: FAILED with status %s after %d s\n' "$name" "$status" $((SECONDS - start))
        failed+=("$name")
    fi
}

table() { # table NAME SECONDS ARGUMENTS...: benchmarks/NAME.py writes NAME_gpu.md. An earlier run's must not pass for it
    rm -f "$out/$1_gpu".*
    run "$1" "$2" "$python" "benchmarks/$1.py" "${@:3}" --out "$out/$1_gpu.md"
}

command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
PYTHONPATH=. "$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("launch/gpu_check.sh: no GPU here"); print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), "NCCL", torch.cuda.nccl.version())' || exit 1

# Without addopts: --strict-config refuses the settings of pytest-timeout where that is not installed.
tests=("$python" -m pytest -q -o addopts=-ra)
for part in "${parts[@]}"; do
    case $part in
        nccl) run nccl 240 "${tests[@]}" tests/gpu/test_collectives_on_gpu.py tests/gpu/test_sharded_on_gpu.py ;;
        loop) table loop 420 --numel 300000000 --tensors 300,2000 --device cuda ;;
        offload) table offload 300 --numel 1000000000 --width 8192 --tokens 32768 --seconds 120 --variants ;;
        codes) table kernels 240 --registers 80,96,104,128 ;;
        tables)
            run native.c 120 "$python" megascale/kernels/native/levels.py
            run tests 240 "${tests[@]}" tests/gpu
            table step 120 --numel 400000000 --tensors 300 --rounds 12 --device cuda --backends triton,torch
            table graph 50 --backends triton
            ;;
    esac
done

if ((${#failed[@]})); then
    printf '\nfailed: %s\n' "${failed[*]}"
    exit 1
fi
printf '\nall passed: %s\n' "${parts[*]}"
