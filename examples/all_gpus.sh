#!/bin/bash
# One extraction on each GPU of this host, all into the same DIR; then all samples are checked.
#
#   examples/all_gpus.sh MODEL tokenized.jsonl DIR [more options of `spec-vllm-compat extract`]
#
# GPUS=4 takes the first four. For a model that needs several GPUs: GPUS_PER_JOB=2, which is passed on as --tp-size.
# Started again after a failure it does what is left. What each job says is in DIR.shard-I.log.
set -euo pipefail

model=$1 data=$2 directory=$3
shift 3
per_job=${GPUS_PER_JOB:-1}
jobs=$((${GPUS:-$(nvidia-smi --list-gpus | wc -l)} / per_job))
if [ "$jobs" -lt 1 ]; then
    echo "expected at least $per_job GPUs" >&2
    exit 2
fi

running=()
for ((shard = 0; shard < jobs; shard++)); do
    devices=$(seq -s, $((shard * per_job)) $(((shard + 1) * per_job - 1)))
    CUDA_VISIBLE_DEVICES=$devices spec-vllm-compat extract --model-path "$model" --prepared-data "$data" \
        --output-dir "$directory" --tp-size "$per_job" --num-shards "$jobs" --shard-index "$shard" "$@" \
        >"$directory.shard-$shard.log" 2>&1 &
    running+=($!)
done
trap 'kill -INT "${running[@]}"' INT TERM

failed=0
for shard in "${!running[@]}"; do
    if ! wait "${running[$shard]}"; then
        failed=1
        echo "shard $shard failed; the end of $directory.shard-$shard.log:" >&2
        tail -n 5 "$directory.shard-$shard.log" >&2
    fi
done
[ "$failed" = 0 ] && spec-vllm-compat verify "$directory" --quick
