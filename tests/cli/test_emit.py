"""``highwater emit`` as a user runs it."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import Run, following, offered, refusal

ASKED = ("Qwen3-0.6B", "--gpus", "4xH20-96GB", "--length", "16k", "--allocator", "expandable")


def test_trinitys_file_is_what_stdout_has(highwater: Run, tmp_path: Path) -> None:
    done = highwater("emit", "--for", "trinity", *ASKED, "--rollout-gpus", "2")
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(done.stdout)
    assert document["cluster"]["gpu_per_node"] == 4
    assert document["trainer"]["trainer_type"] == "verl"
    assert done.stdout.startswith(
        "# Trinity-RFT 0.6.0: Qwen3-0.6B, 16,384 tokens, 2 x H20-96GB, 2 more for rollout\n"
    )
    assert highwater(*following(done)).returncode == 0


def test_the_hint_past_a_models_own_scaling_works_for_the_trainer(highwater: Run) -> None:
    words = (
        "emit",
        "--for",
        "trinity",
        "Llama-3.1-8B",
        "--gpus",
        "8xH200-141GB",
        "--length",
        "200k",
    )
    hint = refusal(highwater(*words), 2)[1]
    done = highwater(*words, *offered(hint)[0])
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"]["rope_scaling"]["rope_type"] == "yarn"


def test_offload_that_is_asked_for_is_predicted_as_it_is_emitted(highwater: Run) -> None:
    words = ("Qwen3-8B", "--gpus", "4xA100-80GB", "--length", "64k", "--offload")
    emitted = highwater("emit", "--for", "verl", *words)
    assert "note: " not in emitted.stderr
    assert "actor_rollout_ref.actor.strategy=fsdp2" in emitted.stdout
    found = json.loads(highwater("recommend", *words, "--trainer", "trinity", "--json").stdout)
    assert found["chosen"]["cell"]["settings"]["strategy"] == "fsdp2"


def test_verls_script_is_what_stdout_has(highwater: Run, tiny: Path) -> None:
    done = highwater("emit", "--for", "verl", str(tiny), *ASKED[1:-4], "--length", "4k")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "#!/usr/bin/env bash"
    assert done.stdout.splitlines()[1].startswith("# verl 0.9.1: tiny")
    assert f'actor_rollout_ref.model.path="{tiny}"' in done.stdout


def test_each_of_the_others_prints_its_file_and_the_command_that_follows_works(
    highwater: Run, tmp_path: Path
) -> None:
    words = ("Qwen3-8B", "--gpus", "4xH20-96GB", "--length", "64k", "--loss", "chunked")
    for target, first in (
        ("trl", "# TRL 1.16.0"),
        ("accelerate", "# accelerate 1.15.0"),
        ("torchtitan", "# torchtitan 0.3.0"),
    ):
        done = highwater("emit", "--for", target, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{first}: Qwen3-8B, ")
        assert "highwater's own engine" in done.stdout
        assert "--trainer" not in following(done)
        assert highwater(*following(done)).returncode == 0


def test_the_file_beside_trls_is_what_emit_prints_for_accelerate(highwater: Run) -> None:
    words = ("Qwen3-8B", "--gpus", "4xH20-96GB", "--length", "64k", "--json")
    of_trl, of_accelerate = (
        json.loads(highwater("emit", "--for", target, *words).stdout)
        for target in ("trl", "accelerate")
    )
    assert of_trl["beside"] == {"accelerate.yaml": of_accelerate["text"]}
    assert yaml.safe_load(of_trl["text"])["accelerate_config"] == "accelerate.yaml"
    assert of_accelerate["cannot"]


def test_areal_is_predicted_as_verls_actor(highwater: Run) -> None:
    done = highwater("emit", "--for", "areal", *ASKED, "--rollout-gpus", "2")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["rollout"]["backend"] == "sglang:d2"
    assert "Trinity-RFT's trainer" in done.stdout
    assert "--trainer trinity" in done.stderr


def test_one_document_has_the_values_by_name(highwater: Run) -> None:
    document = json.loads(highwater("emit", "--for", "verl", *ASKED, "--json").stdout)
    assert (document["schema_version"], document["target"], document["checked_with"]) == (
        1,
        "verl",
        "0.9.1",
    )
    assert document["values"]["actor_rollout_ref.actor.use_dynamic_bsz"] is True


def test_where_nothing_fits_there_is_no_configuration(highwater: Run) -> None:
    done = highwater(
        "emit",
        "--for",
        "trinity",
        "Qwen3-32B",
        "--gpus",
        "1xL40S",
        "--length",
        "32k",
        "--allocator",
        "native",
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing fits" in done.stderr
    assert following(done)[:2] == ["recommend", "Qwen3-32B"]


def test_where_nothing_fits_the_document_is_the_recommendations(highwater: Run) -> None:
    words = ("Qwen3-32B", "--gpus", "1xL40S", "--length", "32k", "--allocator", "native")
    done = highwater("emit", "--for", "trinity", *words, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == json.loads(
        highwater("recommend", *words, "--trainer", "trinity", "--json").stdout
    )
    assert json.loads(done.stdout)["chosen"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (ASKED, "--for"),
        (("--for", "verl", *ASKED, "--rollout-gpus", "1"), "share their GPUs"),
        (("--for", "megatron", *ASKED), "megatron"),
        (("--for", "areal", *ASKED), "none are set aside"),
        (
            ("--for", "verl", *ASKED, "--loss", "chunked"),
            "verl's configuration has no words for --loss chunked",
        ),
        (
            ("--for", "trinity", *ASKED, "--study", "mine.jsonl"),
            "say nothing about Trinity-RFT's trainer, which is verl's actor",
        ),
        (("--for", "trl", *ASKED, "--objective", "ppo"), "TRL trains sft, grpo, rw, dpo, not ppo"),
        (("--for", "trinity", "Qwen3-8B", "--gpus", "4xH20-96GB"), "no length is named"),
        (("--for", "trinity", *ASKED, "--trainer", "highwater"), "unknown flag --trainer"),
    ],
)
def test_what_cannot_be_emitted_is_refused(
    highwater: Run, words: tuple[str, ...], said: str
) -> None:
    assert said in refusal(highwater("emit", *words), 2)[0]


@pytest.mark.parametrize(("target", "name"), [("verl", "verl"), ("areal", "AReaL")])
@pytest.mark.parametrize("words", ["--ring 2", "--copies 2", "--copies 2 --ring 2"])
def test_a_layout_that_a_trainer_has_no_words_for_is_refused_by_its_own_name(
    highwater: Run, target: str, name: str, words: str
) -> None:
    rollout = ("--rollout-gpus", "2") if target == "areal" else ()
    asked = ("emit", "--for", target, *ASKED, *rollout)
    problem, hint = refusal(highwater(*asked, *words.split()), 2)
    assert problem == f"{name}'s configuration has no words for {words}"
    assert offered(hint) == [words.split()]
    assert highwater(*asked).returncode == 0


@pytest.mark.parametrize("target", ["trl", "accelerate", "torchtitan"])
@pytest.mark.parametrize("objective", ["sft", "dpo", "ppo"])
@pytest.mark.parametrize(
    "degrees",
    [
        "--ulysses 2 --ring 2",
        "--ulysses 2 --ring 2 --copies 2",
        "--ulysses 2 --copies 2",
        "--ulysses 1 --ring 4 --copies 4",
        "--ulysses 1 --ring 2 --copies 4",
    ],
)
def test_a_hint_names_all_that_has_to_change_for_a_trainer(
    highwater: Run, target: str, objective: str, degrees: str
) -> None:
    asked = ("emit", "--for", target, "Qwen3-0.6B", "--gpus", "8xH200-141GB", "--length", "16k")
    words = (*asked, "--objective", objective, *degrees.split())
    done = highwater(*words)
    if done.returncode == 0:
        return
    _, hint = refusal(done, 2)
    assert offered(hint)
    for way in offered(hint):
        mended = highwater(*words, *way)
        assert mended.returncode == 0, (way, mended.stderr)
