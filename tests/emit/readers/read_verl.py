"""Run ``verl.sh`` in each folder by a shell, and compose its overrides with verl's Hydra
configuration: ``read_verl.py FOLDER...``.

``python3`` within it is this file, ``--composed``, in the place of ``-m verl.trainer.main_ppo``.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path


def composed(words):
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from transformers import AutoConfig
    from verl.utils.config import omega_conf_to_dataclass

    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words[2:])
    actor, worker = config.actor_rollout_ref.actor, config.actor_rollout_ref
    checked = omega_conf_to_dataclass(actor)
    model = AutoConfig.from_pretrained(worker.model.path)
    budgets = {
        actor.ppo_max_token_len_per_gpu,
        worker.ref.log_prob_max_token_len_per_gpu,
        worker.rollout.log_prob_max_token_len_per_gpu,
    }
    (budget,) = budgets
    return {
        "length": worker.rollout.max_model_len,
        "budget": budget,
        "sp": checked.ulysses_sequence_parallel_size,
        "gpus": config.trainer.n_gpus_per_node * config.trainer.nnodes,
        "offload": checked.fsdp_config.offload_policy,
        "strategy": checked.strategy,
        "recompute": worker.model.enable_gradient_checkpointing,
        "on_host": worker.model.enable_activation_offload,
        "path": worker.model.path,
        "lora": {
            "rank": worker.model.lora_rank,
            "alpha": worker.model.lora_alpha,
            "targets": OmegaConf.to_container(worker.model).get("target_modules"),
        }
        if worker.model.lora_rank
        else None,
        "dtype": checked.fsdp_config.model_dtype,
        "load_format": worker.rollout.load_format,
        "rope": model.rope_parameters,
        "longest": model.max_position_embeddings,
    }


if sys.argv[1] == "--composed":
    Path("composed.json").write_text(json.dumps(composed(sys.argv[2:])))
    sys.exit()

answers = []
for folder in map(Path, sys.argv[1:]):
    shim = folder / "bin" / "python3"
    shim.parent.mkdir()
    shim.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} --composed "$@"\n'
    )
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "verl.sh"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    answers.append(json.loads((folder / "composed.json").read_text()))
json.dump(answers, sys.stdout)
