"""Read ``llamafactory.yaml`` in each folder as each process of LLaMA-Factory does."""

import json
import os
import sys
from pathlib import Path

import yaml
from launched import alone, environment, shared
from llamafactory.hparams import get_train_args
from llamafactory.hparams.parser import read_args
from transformers import AutoConfig

answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    is_named = "model_name_or_path" in yaml.safe_load(Path("llamafactory.yaml").read_text())
    elsewhere = [] if is_named else [f"model_name_or_path={os.environ['MODEL_PATH']}"]
    how = shared(["--config_file", "accelerate.yaml"])
    with environment(alone()):
        # without a GPU, bf16 is refused but for the CPU
        words = ["llamafactory.yaml", "use_cpu=true", "report_to=none", *elsewhere]
        before, sys.argv[1:] = sys.argv[1:], words
        model, data, training, tuning, _ = get_train_args(read_args())
        sys.argv[1:] = before
    attention = str(getattr(model.flash_attn, "value", model.flash_attn))
    assert data.neat_packing is (attention == "fa2")  # borders in a row are flash attention's
    length = data.cutoff_len + data.neat_packing  # what it takes off a row to pack, it pads again
    config = AutoConfig.from_pretrained(model.model_name_or_path)
    answers.append(
        {
            **{name: each for name, each in how.items() if name not in ("sp", "passes_on")},
            "sp": 1,
            "recompute": not model.disable_gradient_checkpointing,
            "recomputes_twice": how["recompute"] and not model.disable_gradient_checkpointing,
            "length": length,
            "budget": training.per_device_train_batch_size * length,
            "path": model.model_name_or_path,
            "lora": {
                "rank": tuning.lora_rank,
                "alpha": tuning.lora_alpha,
                "targets": tuning.lora_target,
                "dropout": tuning.lora_dropout,
            }
            if tuning.finetuning_type == "lora"
            else None,
            "packed": [model.quantization_bit, model.quantization_type, model.double_quantization],
            "chunked": model.enable_liger_kernel,
            "attention": attention,
            "optim": str(getattr(training.optim, "value", training.optim)),
            "dtype": str(model.compute_dtype).removeprefix("torch."),
            "rope": config.rope_parameters,
            "longest": config.max_position_embeddings,
        }
    )
json.dump(answers, sys.stdout)
