"""Read ``axolotl.yaml`` in each folder as ``axolotl train`` does, up to its validation, and what
accelerate makes of the environment that it sets: ``read_axolotl.py FOLDER...``.

It asks for the GPUs of the machine and for ring-flash-attn, which needs flash-attn, which is built
for CUDA alone: it is told of eight H200s, and the package is an empty one. Its schema lets names
through that it does not have: these end the reader.
"""

import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
sys.modules["ring_flash_attn"] = ModuleType("ring_flash_attn")

import yaml
from axolotl.cli.config import prepare_plugins
from axolotl.integrations.config import merge_input_args
from axolotl.loaders.utils import load_model_config
from axolotl.utils.config import normalize_config, validate_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.fsdp import FSDPConfig
from axolotl.utils.trainer import setup_fsdp_envs, setup_parallelism_envs
from launched import environment, made

H200 = {"bf16": True, "fp8": True, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_90"}


def refuse_unknown(names, model):
    known = set(model.model_fields) | {each.alias for each in model.model_fields.values()}
    if set(names) - known:
        sys.exit(f"axolotl has no {', '.join(set(names) - known)}")


answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    with environment({}):
        document = yaml.safe_load(Path("axolotl.yaml").read_text())
        document.setdefault("base_model", os.environ["MODEL_PATH"])
        prepare_plugins(DictDefault(document))
        refuse_unknown(document, merge_input_args()[0])
        refuse_unknown(document["fsdp_config"], FSDPConfig)
        config = validate_config(
            DictDefault(document), capabilities=H200, env_capabilities={"torch_version": "2.13.0"}
        )
        (gpus,) = re.findall(r"torchrun --nproc_per_node=(\d+) ", Path("launch.sh").read_text())
        before = dict(os.environ)
        setup_fsdp_envs(config)
        setup_parallelism_envs(config)
        variables = {name: each for name, each in os.environ.items() if each != before.get(name)}
    how = made({**variables, "PROCESSES": gpus, "ACCELERATE_MIXED_PRECISION": "bf16"})
    with environment({}):
        normalize_config(config)
        model = load_model_config(config)
    tokens = config.micro_batch_size * config.sequence_len
    answers.append(
        {
            **{name: each for name, each in how.items() if name != "passes_on"},
            "length": config.sequence_len,
            "budget": tokens // how["sp"],
            "packs": bool(config.sample_packing),
            "path": config.base_model,
            "lora": {
                "rank": config.lora_r,
                "alpha": config.lora_alpha,
                "targets": "all-linear"
                if config.lora_target_linear
                else list(config.lora_target_modules),
                "dropout": config.lora_dropout,
            }
            if config.adapter
            else None,
            "packed": [config.adapter, bool(config.load_in_4bit)],
            "chunked": bool(config.liger_fused_linear_cross_entropy),
            "cut": bool(config.cut_cross_entropy),
            "optim": config.optimizer,
            "on_host": config.activation_offloading,
            "dtype": str(config.torch_dtype).removeprefix("torch."),
            "attention": config.attn_implementation,
            "rope": model.rope_parameters,
            "longest": model.max_position_embeddings,
        }
    )
json.dump(answers, sys.stdout)
