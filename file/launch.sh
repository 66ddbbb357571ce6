#!/usr/bin/env bash
# TRL 1.16.0, as `highwater emit --for trl Qwen3-8B --gpus 4xA100-80GB --length 8k` wrote it
# what is typed after it goes to the trainer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export PYTORCH_ALLOC_CONF=expandable_segments:True
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec trl sft --config trl.yaml "$@"
