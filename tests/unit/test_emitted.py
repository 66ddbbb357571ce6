"""A recommendation in other trainers' words: every name and type is one that the trainer's own
package has.
"""

import json
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import recorded

from highwater.errors import UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.recommendation.recommend import recommend
from highwater.trainers import verl as verl_file
from highwater.trainers.emitted import Emitted, nested
from highwater.trainers.trinity import words as trinity_file
from highwater.trainers.trinity.words import trinity
from highwater.trainers.verl import verl
from places import examples

DATA = Path(__file__).parents[1] / "data"
_TYPES = {
    "int": int,
    "bool": bool,
    "str": str,
    "Optional[int]": int,
    "Optional[float]": float,
    "Optional[str]": str,
}


PATH = "actor_rollout_ref.model.path"
PATHS = [
    ("/models/mine", '"/models/mine"', "/models/mine"),
    ("ep=3,a b", '"ep=3,a b"', "ep=3,a b"),
    ("${oc.env:HOME}", r'"\${oc.env:HOME}"', r"\${oc.env:HOME}"),
    ("it's", '"it\'s"', "it's"),
    ('say "a"', r'"say \"a\""', 'say "a"'),
    ("a\\b\\", r'"a\b\\"', "a\\b\\"),
    ("\\${x}", r'"\\\${x}"', r"\\\${x}"),
]
"""A path, as Hydra 1.3.2 reads it, and as OmegaConf 2.3.1 does: both gave back the path."""


def read_by_hydra(quoted: str) -> str:
    """A quoted value: a quote within has an odd number of backslashes before it, the end an even
    one; half are meant.
    """
    quote, within = quoted[0], quoted[1:-1]
    assert quote in "\"'"
    assert quoted[-1] == quote
    ends = re.findall(rf"(\\*){quote}", within)
    assert all(len(backslashes) % 2 for backslashes in ends), quoted
    assert len(re.findall(r"\\*\Z", within)[0]) % 2 == 0, quoted
    return re.sub(
        rf"(\\+)({quote}|\Z)", lambda found: found[1][: len(found[1]) // 2] + found[2], within
    )


def read_by_omegaconf(text: str) -> str:
    """Text without an interpolation; backslashes count before ``${``."""
    assert all(len(backslashes) % 2 for backslashes in re.findall(r"(\\*)\$\{", text)), (
        "an interpolation"
    )
    return re.sub(r"(\\+)\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def goal(length: int | str = "64k", **changes) -> tuple[Recommendation, Candidate]:
    words = {
        "model": "Qwen3-4B",
        "gpus": "4xH200-141GB",
        "length": length,
        "trainer": "trinity",
        "allocator": "expandable",
    }
    found = recommended(json.dumps(words | changes))
    assert found.chosen is not None
    return found, found.chosen


@cache
def recommended(words: str) -> Recommendation:
    """Asked once: a recommendation for Trinity-RFT's trainer takes seconds."""
    return recommend(**json.loads(words))


def rungs() -> list[tuple[Recommendation, Candidate]]:
    found, _ = goal()
    return [(found, candidate) for candidate in found.candidates]


@pytest.mark.parametrize(
    ("found", "candidate"), rungs(), ids=lambda each: getattr(each, "label", "")
)
def test_every_setting_of_trinity_is_one_that_trinity_has(found, candidate):
    known = recorded("trinity-rft", trinity_file.VERSION)
    for name, value in trinity(found, candidate).values.items():
        if name.startswith("model.rope_scaling."):
            assert known["model.rope_scaling"] == "Optional[dict]"
        else:
            assert type(value) is _TYPES[known[name]], name


@pytest.mark.parametrize(
    ("found", "candidate"), rungs(), ids=lambda each: getattr(each, "label", "")
)
def test_every_override_of_verl_is_one_that_verl_has(found, candidate):
    known = recorded("verl", verl_file.VERSION)
    for name, value in verl(found, candidate).values.items():
        assert known[name] == "any" or type(value) is _TYPES[known[name]], name


def test_the_yaml_says_what_the_values_say_and_what_was_recommended():
    found, chosen = goal(rollout_gpus=2)
    emitted = trinity(found, chosen, model_path="/models/mine")
    document = yaml.safe_load(emitted.text)
    assert document == nested(emitted.values)
    assert document["mode"] == "both"
    assert document["cluster"] == {"node_num": 1, "gpu_per_node": 4}
    assert document["explorer"]["rollout_model"] == {"engine_num": 2, "tensor_parallel_size": 1}
    assert document["model"]["model_path"] == "/models/mine"
    assert document["model"]["max_model_len"] == 65_536
    assert document["model"]["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 1.6,
        "original_max_position_embeddings": 40_960,
    }
    trainer = document["trainer"]
    assert trainer["ulysses_sequence_parallel_size"] == chosen.cell.layout.ulysses_degree
    assert trainer["max_token_len_per_gpu"] == chosen.token_budget_tokens
    both = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert emitted.environment == both
    assert (
        f"before `ray start`: export "
        f"{' '.join(f'{name}={value}' for name, value in both.items())}\n" in emitted.text
    )


@pytest.mark.parametrize("emit", [trinity, verl])
def test_offload_is_fsdp2s_policy(emit):
    for found, candidate in rungs():
        values = emit(found, candidate).values
        strategy, policy = (
            next(v for n, v in values.items() if n.endswith(end))
            for end in ("strategy", "offload_policy")
        )
        assert (strategy, policy) == (
            ("fsdp2", True) if candidate.cell.settings.offload else ("fsdp", False)
        )


@pytest.mark.parametrize("emit", [trinity, verl])
@pytest.mark.parametrize("query", [{}, {"offload": True}, {"offload": True, "allocator": "native"}])
def test_what_is_emitted_is_what_was_predicted(emit, query):
    """Asked for or offered by the ladder, offload is FSDP2's, which leaves no states on the GPU."""
    found, _ = goal(**{"allocator": None, **query})
    for candidate in found.candidates:
        strategy = next(
            v for n, v in emit(found, candidate).values.items() if n.endswith("strategy")
        )
        assert strategy == candidate.cell.settings.strategy
    offered, _ = goal(allocator=None)
    if "allocator" not in query:
        last = offered.candidates[-1]
        assert last in found.candidates
    assert not any("FSDP1" in note or "--strategy" in note for note in found.notes)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from(rungs()),
    st.one_of(st.none(), st.text(st.characters(exclude_categories=["C"]), min_size=1)),
)
def test_a_shell_reads_the_script_of_verl_as_the_values_say(rung, path):
    emitted = verl(*rung, model_path=path)
    command = emitted.text[emitted.text.index("python3 -m") :]
    shown = command.replace("python3 -m verl.trainer.main_ppo", r"printf '%s\0'", 1)
    done = subprocess.run(
        ["bash", "-c", shown], capture_output=True, env={"MODEL_PATH": "/models/mine"}, check=True
    )
    words = done.stdout.decode().split("\0")[:-1]
    values = emitted.values | {
        PATH: "/models/mine" if emitted.values[PATH] == "$MODEL_PATH" else emitted.values[PATH]
    }
    said = dict(word.split("=", 1) for word in words)
    assert list(said) == list(values)
    assert read_by_omegaconf(read_by_hydra(said.pop(PATH))) == values.pop(PATH)
    assert said == {name: str(value) for name, value in values.items()}


@pytest.mark.parametrize(("path", "quoted", "written"), PATHS, ids=lambda each: each)
def test_a_path_is_a_path_whatever_hydra_and_omegaconf_make_of_its_characters(
    path, quoted, written
):
    (word,) = [
        word
        for word in shlex.split(verl(*goal(), model_path=path).command)
        if word.startswith(PATH)
    ]
    assert word == f"{PATH}={quoted}"
    document = yaml.safe_load(trinity(*goal(), model_path=path).text)
    assert document["model"]["model_path"] == written
    assert read_by_omegaconf(read_by_hydra(quoted)) == read_by_omegaconf(written) == path


def test_a_path_that_nobody_named_comes_from_the_environment():
    assert """ actor_rollout_ref.model.path="'$MODEL_PATH'" """ in verl(*goal()).text
    assert yaml.safe_load(trinity(*goal()).text)["model"]["model_path"] == "${oc.env:MODEL_PATH}"


def test_verl_is_not_given_what_ends_its_rollout():
    emitted = verl(*goal())
    assert emitted.environment == {}
    assert "vLLM's sleep mode" in emitted.text
    assert not re.search(r"^(export|PYTORCH)", emitted.text, re.MULTILINE)


def test_verls_gpus_are_shared_so_none_are_set_aside():
    found, chosen = goal(rollout_gpus=2)
    with pytest.raises(UsageError, match="share their GPUs") as refused:
        verl(found, chosen)
    assert verl(*goal(reserved=shlex.split(refused.value.hint.split("`")[3])[1]))


@pytest.mark.parametrize("emit", [trinity, verl])
def test_the_block_for_the_models_config_is_the_recommended_one_and_every_figure_is_labelled(emit):
    found, chosen = goal()
    emitted = emit(found, chosen)
    block = next(line for line in emitted.text.splitlines() if line.startswith("# {"))
    assert json.loads(block.removeprefix("# ")) == {
        "rope_parameters": found.yarn.rope_parameters,
        "max_position_embeddings": 65_536,
    }
    assert "predicted" in emitted.text
    assert from_json(to_json(emitted), Emitted) == emitted


@pytest.mark.parametrize("emit", [trinity, verl])
def test_no_name_ends_a_comment(emit):
    found, chosen = goal()
    for end in ("\n", "\r", "\x0b", "\u2028", "\x85"):
        emitted = emit(msgspec.structs.replace(found, model_name=f"a{end}touch b"), chosen)
        assert not any(line.startswith("touch") for line in emitted.text.splitlines())
