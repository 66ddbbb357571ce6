"""Accelerate itself: a script that it launches on the CPU to a real out of memory."""

import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import highwater
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import Outcome
from highwater.trainers.accelerate import launcher_file
from trial_specs import trial_of

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parents[2] / "docs/results/other_trainers/hf_trainer.py"
LONG = 16384
"""A length whose logits of this model, in float32, are past what is left of the bound."""


def test_find_finds_the_capacity_of_a_launched_script(mark, wide, tmp_path, monkeypatch):
    program = tmp_path / "accelerate"  # as pip makes it; `forked_modules` runs what it would
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    study = highwater.find(
        str(wide),
        trainer="accelerate",
        command=shlex.join((str(program), "launch", str(SCRIPT), "--model", "{model}"))
        + " --max-len {length} --steps {steps} --output {output}",
        device="cpu",
        memory="2500MiB",
        start_length=64,
        resolution=LONG - 64,
        max_length=LONG,
        study="accelerate.jsonl",
    )
    (answer,) = study.answers
    assert (answer.capacity_tokens, answer.does_not_fit_tokens) == (64, LONG), answer.reason
    ended = {
        trial.spec.length_tokens: trial.result for trial in study.trials if trial.result is not None
    }
    assert ended[64].outcome is Outcome.FIT
    assert ended[64].ranks[0].memory.peak_data_segment_bytes
    assert ended[LONG].outcome is Outcome.OUT_OF_MEMORY
    assert "allocate" in ended[LONG].reason
    made = [path for path in (tmp_path / "cache/highwater/models").iterdir() if path.is_dir()]
    assert len(made) == 1, "weights are drawn once for all trials"


@pytest.mark.parametrize(
    ("settings", "layout", "read"),
    [
        (Settings(), Layout(), {"use_fsdp": True, "fsdp_version": 2, "num_processes": 1}),
        (
            Settings(strategy="fsdp", offload=True),
            Layout(gpus=2),
            {"fsdp_version": 1, "fsdp_offload_params": True, "num_processes": 2},
        ),
        (
            Settings(recompute="none"),
            Layout(gpus=4, ring_degree=2),
            {
                "fsdp_activation_checkpointing": False,
                "use_parallelism_config": True,
                "parallelism_config_cp_size": 2,
                "parallelism_config_dp_shard_size": 2,
            },
        ),
    ],
)
def test_accelerate_reads_what_a_trial_on_gpus_writes(tiny, tmp_path, settings, layout, read):
    launch = import_module("accelerate.commands.launch")  # slow: it opens torch
    model = load_model(str(tiny))
    spec = trial_of(tiny, layout=layout, settings=settings)
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(launcher_file(spec, model.shape, {}, source="").config))
    typed = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    found, _, _ = launch._validate_launch_command(typed)
    assert read.items() <= vars(found).items()
    assert (found.main_process_port, found.mixed_precision) == (0, "bf16")
