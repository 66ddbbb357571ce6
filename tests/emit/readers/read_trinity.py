"""Read ``trinity.yaml`` in each folder with Trinity-RFT's ``load_config``."""

import json
import os
import sys

from trinity.common.config import load_config

answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    config = load_config("trinity.yaml")
    trainer, rope = config.trainer, config.model.rope_scaling
    (lora,) = config.model.lora_configs or [None]
    answers.append(
        {
            "length": config.model.max_model_len,
            "budget": trainer.max_token_len_per_gpu,
            "sp": trainer.ulysses_sequence_parallel_size,
            "gpus": config.cluster.gpu_per_node * config.cluster.node_num,
            "offload": trainer.offload_policy,
            "strategy": trainer.trainer_strategy,
            "path": config.model.model_path,
            "lora": lora
            and {
                "rank": lora.lora_rank,
                "alpha": lora.lora_alpha,
                "targets": lora.target_modules,
                "name": lora.name,
                "sent_by": config.synchronizer.sync_method.value,
            },
            "rope": rope and {**rope, "rope_theta": config.model.rope_theta},
        }
    )
json.dump(answers, sys.stdout)
