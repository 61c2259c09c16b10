#!/usr/bin/env bash
# Train under Slurm; submit from the repository's root. sbatch's own options choose nodes, GPUs and time.
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh [a.b=c ...]
# Ranks per node: one for each GPU, or RANKS_PER_NODE. Two minutes before the time limit the run saves and stops; submit
# the same command again to go on. MASTER: the node where ranks meet, default the job's first. DRY_RUN=1 only prints.
#SBATCH --job-name=megascale
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --output=slurm-%j.log
set -euo pipefail
: "${SLURM_JOB_ID:?start this script with sbatch}"
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file from elsewhere
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
first=${MASTER:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
port=$((20000 + SLURM_JOB_ID % 20000))

run() {
    printf '+' && printf ' %q' "$@" && echo
    [[ -n ${DRY_RUN:-} ]] || exec "$@"
}

run srun --kill-on-bad-exit=1 "$python" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" --rdzv-backend c10d \
    --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" -m megascale.train "$@"
