"""Read ``ms-swift.yaml`` in each folder as ``swift sft`` does."""

import json
import os
import sys
from pathlib import Path

import yaml
from launched import alone, environment
from swift.arguments import SftArguments
from swift.cli.main import get_torchrun_args, parse_yaml_args
from swift.utils import parse_args
from transformers import AutoConfig

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    with environment({}):
        is_named = "model" in yaml.safe_load(Path("ms-swift.yaml").read_text())
        words = ["ms-swift.yaml", *([] if is_named else ["--model", os.environ["MODEL_PATH"]])]
        parse_yaml_args(words)
        _, gpus = get_torchrun_args()
        of_the_file = {name: os.environ.get(name) for name in ALLOCATOR}
        with environment(alone()):
            # without a GPU, bf16 is refused but for the CPU
            quiet = ["--use_cpu", "true", "--report_to", "none", "--output_dir", "output"]
            # the directory is not called so
            quiet += ["--model_type", "qwen3", "--template", "qwen3"]
            found, rest = parse_args(SftArguments, [*words, *quiet])
    if rest:
        sys.exit(f"ms-swift has no {rest}")
    plugin = found.training_args.fsdp_plugin_args or {}  # without FSDP there is none
    own = found.gradient_checkpointing
    config = AutoConfig.from_pretrained(found.model_dir)
    answers.append(
        {
            "gpus": int(gpus),
            "sp": found.sequence_parallel_size,
            "strategy": f"fsdp{plugin['fsdp_version']}" if plugin else "ddp",
            "offload": plugin.get("cpu_offload", False),
            "recompute": plugin.get("activation_checkpointing", own),
            "recomputes_twice": own and bool(plugin),
            "reshards": plugin.get("reshard_after_forward", False),
            "length": found.max_length,
            "budget": found.per_device_train_batch_size
            * found.max_length
            // found.sequence_parallel_size,
            "packs": found.packing,
            "path": found.model_dir,
            "lora": {
                "rank": found.lora_rank,
                "alpha": found.lora_alpha,
                "targets": found.target_modules,
                "dropout": found.lora_dropout,
            }
            if found.tuner_type == "lora"
            else None,
            "packed": [found.quant_method, found.quant_bits, found.bnb_4bit_quant_type],
            "chunked": found.use_liger_kernel,
            "optim": str(getattr(found.training_args.optim, "value", found.training_args.optim)),
            "dtype": str(found.torch_dtype).removeprefix("torch."),
            "attention": found.attn_impl,
            "rope": config.rope_parameters,
            "longest": config.max_position_embeddings,
            "environment": of_the_file,
        }
    )
json.dump(answers, sys.stdout)
