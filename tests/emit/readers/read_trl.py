"""Read ``trl.yaml`` in each folder as ``trl sft --config`` does, and what it launches."""

import json
import os
import sys
from pathlib import Path

import yaml
from launched import environment, shared
from transformers import AutoConfig
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.scripts.sft import make_parser

ELSEWHERE = ["--model_name_or_path", os.environ["MODEL_PATH"]]

answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    with environment({}):
        parser = make_parser(prog="trl sft")
        is_named = "model_name_or_path" in yaml.safe_load(Path("trl.yaml").read_text())
        # without a GPU, bf16 is refused but for the CPU
        words = ["--config", "trl.yaml", "--use_cpu", "true", *([] if is_named else ELSEWHERE)]
        _, training, model, _, of_config, of_words = parser.parse_args_and_config(
            words, return_remaining_strings=True, separate_remaining_strings=True
        )
        how = shared(resolve_accelerate_config_argument(of_config + of_words))
        config = AutoConfig.from_pretrained(
            model.model_name_or_path, **(training.model_init_kwargs or {})
        )
        answers.append(
            {
                **how,
                "recompute": how.get("recompute", False) or training.gradient_checkpointing,
                "recomputes_twice": how.get("recompute", False) and training.gradient_checkpointing,
                "attention": model.attn_implementation,
                "length": training.max_length,
                "budget": training.per_device_train_batch_size * training.max_length // how["sp"],
                "path": model.model_name_or_path,
                "lora": {
                    "rank": model.lora_r,
                    "alpha": model.lora_alpha,
                    "targets": model.lora_target_modules,
                    "dropout": model.lora_dropout,
                }
                if model.use_peft
                else None,
                "packed": [
                    model.load_in_4bit,
                    model.bnb_4bit_quant_type,
                    model.use_bnb_nested_quant,
                    model.bnb_4bit_quant_storage,
                ],
                "dtype": model.dtype,
                "optim": str(getattr(training.optim, "value", training.optim)),
                "rope": config.rope_parameters,
                "longest": config.max_position_embeddings,
                "environment": {
                    name: os.environ.get(name)
                    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
                },
            }
        )
json.dump(answers, sys.stdout)
