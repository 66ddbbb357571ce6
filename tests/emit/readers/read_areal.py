"""Read ``areal.yaml`` in each folder with AReaL's ``load_expr_config``."""

import json
import os
import sys

from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import GRPOConfig, load_expr_config
from transformers import AutoConfig

answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    # it writes what it read: into this folder
    here = [
        f"++cluster.fileroot={folder}/files",
        f"++cluster.name_resolve.nfs_record_root={folder}/names",
    ]
    config, _ = load_expr_config(["train.py", "--config", "areal.yaml", *here], GRPOConfig)
    actor, parallel = config.actor, ModelAllocation.from_str(config.actor.backend).parallel
    model = AutoConfig.from_pretrained(actor.path)
    answers.append(
        {
            "length": config.sglang.context_length,
            "budget": actor.mb_spec.max_tokens_per_mb // parallel.context_parallel_size,
            "sp": parallel.context_parallel_size,
            "gpus": parallel.world_size,
            "rollout_gpus": ModelAllocation.from_str(config.rollout.backend).parallel.world_size,
            "offload": actor.fsdp.offload_params,
            "recompute": actor.gradient_checkpointing,
            "path": actor.path,
            "lora": {
                "rank": actor.lora_rank,
                "alpha": actor.lora_alpha,
                "targets": list(actor.target_modules),
                "served": (config.rollout.use_lora, config.sglang.enable_lora),
                "served_rank": config.sglang.max_lora_rank,
                "name": config.rollout.lora_name,
                "sent_by": actor.weight_update_mode,
            }
            if actor.use_lora
            else None,
            "dtype": actor.optimizer_dtype,
            "rope": model.rope_parameters,
            "longest": model.max_position_embeddings,
            "environment": actor.scheduling_spec[0].env_vars,
        }
    )
json.dump(answers, sys.stdout)
