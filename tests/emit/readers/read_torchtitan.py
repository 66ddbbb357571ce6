"""Read ``torchtitan_settings.py`` in each folder with torchtitan's ConfigManager."""

import json
import os
import sys

import torch
from torchtitan.config import ConfigManager
from torchtitan.models.common.linear import Linear

MODULE = "torchtitan_settings"


def adapters(model):
    """Rank, alpha and layers of its adapters, and how many numbers are trained; None without."""
    linear = [(name, each) for name, each, *_ in model.traverse(Linear.Config)]
    found = {name.rsplit(".", 1)[-1]: each for name, each in linear if hasattr(each, "rank")}
    if not found:
        return None
    with torch.device("meta"):
        built = model.build()
    trained = {name: p.numel() for name, p in built.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    (numbers,) = {(each.rank, each.alpha) for each in found.values()}
    return {
        "rank": numbers[0],
        "alpha": numbers[1],
        "targets": list(found),
        "trained": sum(trained.values()),
    }


answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.modules.pop(MODULE, None)
    config = ConfigManager().parse_args(["--module", MODULE, "--config", "train"])
    sys.path.remove(folder)
    training, parallelism, model = config.training, config.parallelism, config.model_spec.model
    model.update_from_config(config=config)  # refuses a length past what the positions reach
    is_own = not hasattr(config, "hf_model")
    rope = model.layers[-1].attention.rope if is_own else model.rope_parameters
    answers.append(
        {
            "length": training.seq_len,
            "budget": training.local_batch_size
            * training.seq_len
            // parallelism.context_parallel_degree,
            "sp": parallelism.context_parallel_degree,
            "copies": parallelism.data_parallel_replicate_degree,
            "gpus": parallelism.context_parallel_degree
            * parallelism.data_parallel_shard_degree
            * parallelism.data_parallel_replicate_degree,
            "offload": training.enable_cpu_offload,
            "recompute": type(config.activation_checkpoint).__qualname__ == "FullAC.Config",
            "path": config.hf_assets_path,
            "chunks": getattr(config.loss, "num_chunks", None),
            "lora": adapters(model) if is_own else None,
            "dtype": training.dtype,
            "rope": {
                "rope_type": rope.scaling,
                "factor": rope.rope_factor,
                "original_max_position_embeddings": rope.original_seq_len,
                "rope_theta": rope.theta,
            }
            if is_own
            else rope,
            "longest": rope.max_seq_len if is_own else model.max_seq_len,
        }
    )
json.dump(answers, sys.stdout)
