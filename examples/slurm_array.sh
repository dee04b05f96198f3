#!/bin/bash
# One job of the array extracts one part of the data; all write into the same DIR, each with its own manifest.
#
#   sbatch --array=0-7 examples/slurm_array.sh MODEL tokenized.jsonl DIR [more options of `spec-vllm-compat extract`]
#
# A job that was killed or ran out of time is submitted again with the same --array (or with --array=3 and
# EXTRACT_SHARDS=8 for job 3 of 8 alone): what is there is checked and the rest is done. Start `preflight MODEL` first.
#SBATCH --job-name=extract
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=12:00:00
#SBATCH --signal=B:INT@120
set -euo pipefail

model=$1 data=$2 directory=$3
shift 3

# Ctrl-C lets the running batch end; SLURM sends it two minutes before the time is over.
spec-vllm-compat extract --model-path "$model" --prepared-data "$data" --output-dir "$directory" \
    --num-shards "${EXTRACT_SHARDS:-$SLURM_ARRAY_TASK_COUNT}" --shard-index "$SLURM_ARRAY_TASK_ID" "$@" &
trap 'kill -INT $!' INT
status=0
wait $! || status=$?
while kill -0 $! 2>/dev/null; do # interrupted by the signal, not ended
    status=0
    wait $! || status=$?
done
exit $status
