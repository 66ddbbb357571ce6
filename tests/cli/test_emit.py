"""``highwater emit`` as a user runs it."""

import json
import os
import re
import subprocess

import pytest
import yaml
from conftest import following, refusal

from highwater.cli import recommend as command
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.nouns.trainer import REGISTRY

ASKED = (
    *("Qwen3-0.6B", "--gpus", "4xH20-96GB", "--length", "16k"),
    *("--allocator", "expandable", "--ulysses", "1"),
)
"""Few settings: each is replayed for trainers whose step is traced."""


def test_trinitys_file_is_what_stdout_has(highwater, tmp_path):
    done = highwater("emit", "--for", "trinity", *ASKED, "--rollout-gpus", "2")
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(done.stdout)
    assert document["cluster"]["gpu_per_node"] == 4
    assert document["trainer"]["trainer_type"] == "verl"
    answer, heading = done.stdout.splitlines()[:2]
    assert answer.startswith(
        "# Yes: Qwen3-0.6B trains 16,384 tokens on 2 x H20-96GB for Trinity-RFT's trainer and 2 "
        "for rollout: safe, "
    )
    assert ". With FSDP (as ZeRO-3) and expandable segments; " in answer
    assert heading == (
        "# Trinity-RFT 0.6.0: Qwen3-0.6B, 16,384 tokens, 2 x H20-96GB, 2 more for rollout"
    )
    assert highwater(*following(done)).returncode == 0


def test_each_of_the_others_prints_its_file_and_the_command_that_follows_works(highwater, tmp_path):
    words = ("Qwen3-8B", "--gpus", "4xH20-96GB", "--length", "64k", "--loss", "chunked")
    for target, first in (
        ("trl", "# TRL 1.16.0"),
        ("accelerate", "# accelerate 1.15.0"),
        ("torchtitan", "# torchtitan 0.3.0"),
        ("axolotl", "# Axolotl 0.19.0"),
        ("llamafactory", "# LLaMA-Factory 0.9.5"),
        ("ms-swift", "# ms-swift 4.6.0"),
    ):
        done = highwater("emit", "--for", target, *words)
        assert done.returncode == 0, done.stderr
        answer, heading = done.stdout.splitlines()[:2]
        is_its_own = target != "torchtitan"
        said = "# Not predicted for this trainer: nobody measured what "
        if is_its_own:
            row = REGISTRY[target]
            where = "4 x H20-96GB for " + (row.trained or f"{row.title}'s trainer")
            said = f"# Yes: Qwen3-8B trains 65,536 tokens (1.6 x native 40,960) on {where}: safe, "
        assert answer.startswith(said)
        assert heading.startswith(f"{first}: Qwen3-8B, ")
        assert ("highwater's own engine" in done.stdout) != is_its_own
        half = r"^# This is half of the configuration: `-o DIR` .* Beside it \S+: "
        has_more = target in ("trl", "llamafactory", "ms-swift")
        assert bool(re.search(half, done.stdout, re.MULTILINE)) == has_more
        assert ("--trainer" in following(done)) == is_its_own
        assert highwater(*following(done)).returncode == 0


def test_where_nothing_fits_there_is_no_configuration_and_a_recommendations_document(highwater):
    words = ("Qwen3-32B", "--gpus", "1xL40S", "--length", "32k", "--allocator", "native")
    done = highwater("emit", "--for", "trinity", *words)
    assert done.returncode == 1
    assert done.stdout.startswith("nothing fits: there is nothing to configure. No: ")
    assert done.stdout.count("\n") == 1, "and no line of a file"
    assert following(done)[:2] == ["recommend", "Qwen3-32B"]
    document = json.loads(highwater("emit", "--for", "trinity", *words, "--json").stdout)
    assert document["chosen"] is None
    assert document == json.loads(
        highwater("recommend", *words, "--trainer", "trinity", "--json").stdout
    )


FILES = {
    "trl": ["trl.yaml", "accelerate.yaml", "launch.sh", "CHECK.md"],
    "llamafactory": ["llamafactory.yaml", "accelerate.yaml", "launch.sh", "CHECK.md"],
    "ms-swift": ["ms-swift.yaml", "fsdp.json", "launch.sh", "CHECK.md"],
    "axolotl": ["axolotl.yaml", "launch.sh", "CHECK.md"],
    "verl": ["verl.sh", "launch.sh", "CHECK.md"],
}


@pytest.mark.parametrize("target", FILES)
def test_a_folder_has_every_file_with_the_models_id_filled_in(highwater, target, tmp_path):
    done = highwater("emit", "--for", target, *ASKED, "-o", "taken away")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"taken away/{name}" for name in FILES[target]]
    first, *_ = done.stderr.splitlines()
    assert first.startswith(f"{len(FILES[target])} files for ")
    assert done.stderr.splitlines()[-1] == "next: cat 'taken away/CHECK.md'"
    folder = tmp_path / "taken away"
    assert "Qwen/Qwen3-0.6B" in (folder / FILES[target][0]).read_text()
    assert os.access(folder / "launch.sh", os.X_OK)
    assert subprocess.run(["bash", "-n", folder / "launch.sh"], check=False).returncode == 0
    again = highwater("emit", "--for", target, *ASKED, "--output", "taken away")
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_the_page_of_what_to_check_says_what_was_predicted_and_what_is_missing(highwater, tmp_path):
    words = ("Qwen3-8B", "--gpus", "4xH20-96GB", "--length", "64k", "--ring", "4")
    done = highwater("emit", "--for", "trl", *words, "-o", "mine", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    page = (tmp_path / "mine" / "CHECK.md").read_text()
    assert (tmp_path / "mine" / "trl.yaml").read_text() == document["text"]
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        "# TRL: Qwen3-8B, 65,536 tokens, 4 x H20-96GB",
        "## What was predicted",
        "## What TRL does otherwise",
        "## What is yours to fill in",
        "## Before the first long run",
    ]
    assert all(f"- {each}\n" in page for each in document["cannot"])
    found = json.loads(highwater("recommend", *words, "--trainer", "trl", "--json").stdout)
    used = found["device_bytes"] - found["chosen"]["headroom_bytes"]
    assert f"`nvidia-smi` while they run: {used / 2**30:.2f} GiB of each GPU" in page
    assert highwater(*page.partition("Made by `")[2].partition("`")[0].split()[1:]).returncode == 0
    roomier = page.partition("more headroom: `")[2].partition("`")[0]
    assert highwater(*roomier.split()[1:]).returncode in (0, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("areal", "none are set aside"),
        ("verl --rollout-gpus 1", "share their GPUs"),
        ("verl --lora 1024", "up to rank 512"),
        ("trl --objective ppo", "TRL trains"),
        ("trl --optimizer adamw-bf16", "TRL has no adamw-bf16"),
        ("trinity --lora 8 --lora-targets q_proj", "layers by their names"),
        ("llamafactory --ulysses 2", "shares no sequence"),
        ("trl --attention block_sparse", "no words for --attention block_sparse"),
        ("verl --objective ppo --critic", "no words for --critic --objective ppo"),
        ("verl --rollout vllm --sleep-level 0", "no words for --sleep-level 0"),
    ],
)
def test_what_a_flag_alone_decides_is_refused_before_a_prediction(monkeypatch, words, said):
    def never(*_: object) -> None:
        raise AssertionError("something was predicted")

    monkeypatch.setattr(command, "found_for", never)
    with pytest.raises(UsageError, match=said):
        command.emit(parse(("emit", *ASKED, "--for", *words.split())))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("verl", "algorithm.adv_estimator=grpo"),
        ("trinity --rollout-gpus 2", "algorithm_type: grpo"),
        ("areal --rollout-gpus 2", "type: rl"),
    ],
)
def test_trainers_of_rollouts_are_written_for_grpo_which_may_be_named(highwater, target, said):
    asked = ("emit", *ASKED, "--for", *target.split())
    named = highwater(*asked, "--objective", "grpo")
    assert named.returncode == 0, named.stderr
    assert said in named.stdout
    assert named.stdout == highwater(*asked).stdout
    outside = "A step's seconds leave out generation."
    assert sum(outside in line for line in named.stdout.splitlines()[:2]) == 1
    assert named.stdout.count(" for verl's trainer: ") == (target == "verl")
    problem, _ = refusal(highwater(*asked, "--objective", "dpo"), 2)
    assert "no words for --objective dpo" in problem


def test_verl_is_told_what_vllm_takes_beside_it(highwater):
    vllm = ("--rollout", "vllm", "--gpu-memory-utilization", "0.4")
    shared = ("--rollout-tensor-parallel", "2", "--rollout-sequences", "64")
    done = highwater("emit", *ASKED, "--for", "verl", "--objective", "grpo", *vllm, *shared)
    assert done.returncode == 0, done.stderr
    rollout = dict(re.findall(r"actor_rollout_ref\.rollout\.(\w+)=(\S+)", done.stdout))
    assert rollout["gpu_memory_utilization"] == "0.4"
    assert rollout["tensor_model_parallel_size"] == "2"
    assert rollout["max_num_seqs"] == "64"
    assert rollout["free_cache_engine"] == "True"
    assert "such sequences at once" in done.stdout


def test_for_verl_the_degrees_are_those_that_are_recommended(highwater):
    asked = ("Qwen3-8B", "--gpus", "4xH100-80GB", "--objective", "grpo", "--length", "64k")
    more = "--host-memory=900GiB", "--prompt-tokens=2048", "--allocator=expandable", "--json"
    values = json.loads(highwater("emit", "--for", "verl", *asked, *more).stdout)["values"]
    chosen = json.loads(highwater("recommend", "--trainer", "verl", *asked, *more).stdout)["chosen"]
    degree = values["actor_rollout_ref.actor.ulysses_sequence_parallel_size"]
    assert degree == chosen["cell"]["layout"]["ulysses_degree"] > 1
