"""What is emitted is read by the trainers' own parsers, in environments of their own."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from environments import program_of

from highwater.model.families import TRAINED
from highwater.model.model import load_model
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.trainer import OURS, Target, TrainerName
from highwater.recommendation.recommend import recommend
from highwater.trainers.accelerate import accelerate
from highwater.trainers.emitted import CUT_CROSS_ENTROPY, LIGER, Emitted
from highwater.trainers.llamafactory import FUSED as LLAMAFACTORY_FUSES
from highwater.trainers.targets import LAUNCH, TARGETS, launch_script
from places import captured

pytestmark = [pytest.mark.emit, pytest.mark.timeout(600)]

READERS = Path(__file__).parent / "readers"
MODEL = "Qwen3-4B"
ODD = 'o\'dd "d", = ${oc.env:HOME} $HOME \\ #1: [ü]'
FILES: Mapping[Target, str] = {target: row.file for target, row in TARGETS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    length: str = "128k"
    degree: int = 1
    ring: int = 1
    copies: int = 1
    gpus: int = 4
    offload: bool = False
    directory: str | None = "model"
    """Where the model lies; None: it is asked about by its name, and lies where MODEL_PATH says."""
    allocator: str = "expandable"
    asked: tuple[tuple[str, Any], ...] = ()
    model: str = MODEL


CASES = {
    "within the native length": Case(length="16k", allocator="native"),
    "past the native length": Case(),
    "Ulysses": Case(degree=2),
    "offload": Case(length="16k", offload=True),
    "offload and Ulysses, past the native length": Case(degree=4, offload=True),
    "a path with odd characters": Case(degree=2, directory=ODD),
    "a name": Case(degree=2, directory=None),
}
RINGS_AND_COPIES = {
    "a ring": Case(length="16k", ring=2),
    "a ring, past the native length": Case(ring=4, offload=True),
    "copies": Case(length="16k", copies=2),
    "copies of rings": Case(length="16k", ring=2, copies=2, gpus=8),
}
WINDOWS = Case(length="8k", degree=2, directory=None, model="gemma-2-2b")
"""A model whose layers do not all read every earlier token."""
ON_ONE_GPU = {
    "a path with odd characters": Case(length="16k", directory=ODD),
    "a name": Case(length="16k", directory=None),
}
"""Instead of those of the same name, for a trainer that shares no sequence."""


def cases_of(target: Target) -> Mapping[str, Case]:
    if target in ("trinity", "verl", "areal"):
        return CASES
    if target == "llamafactory":
        return {name: case for name, case in CASES.items() if case.degree == 1} | ON_ONE_GPU
    if target == "ms-swift":
        return {name: case for name, case in RINGS_AND_COPIES.items() if case.copies == 1} | CASES
    return RINGS_AND_COPIES | CASES


def predicting(target: Target, case: Case) -> TrainerName:
    """Whose recommendations are written: this engine's, which have layouts and settings that the
    law of a trainer's own says nothing of, but where that knows all cases.
    """
    is_known = target in ("trinity", "verl", "areal") and "activations" not in dict(case.asked)
    return TARGETS[target].predicted_for if is_known else OURS


CASES_OF: Mapping[Target, Mapping[str, Case]] = {target: cases_of(target) for target in TARGETS}
RINGS: frozenset[Target] = frozenset(("trl", "accelerate"))
"""Trainers that pass keys and values round a ring whatever was predicted."""
SHARDED: frozenset[Target] = RINGS | {"axolotl", "llamafactory", "ms-swift"}


@cache
def place() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="emitted")


@cache
def recommended(target: Target, case: Case) -> tuple[Path, Path, Recommendation, Candidate]:
    folder = Path(mkdtemp(dir=place().name))
    model = folder / (case.directory or "model")
    shutil.copytree(load_model(case.model).directory, model)
    found = goal(predicting(target, case), target == "areal", replace(case, directory=None))
    chosen = next(each for each in found.candidates if each.cell.settings.offload is case.offload)
    return folder, model, found, chosen


@cache
def goal(trainer: TrainerName, is_beside_rollout: bool, case: Case) -> Recommendation:
    """Asked once for all of one prediction: that of Trinity-RFT's trainer takes seconds."""
    rollout = 2 if is_beside_rollout else 0
    return recommend(
        case.model,
        length=case.length,
        gpus=f"{case.gpus + rollout}xH200-141GB",
        rollout_gpus=rollout,
        trainer=trainer,
        allocator=case.allocator,
        ulysses=[case.degree],
        **({"ring": [case.ring]} if case.ring > 1 else {}),
        **({"copies": [case.copies]} if case.copies > 1 else {}),
        **({"offload": True} if case.offload else {}),
        **dict(case.asked),
    )


def written(target: Target, case: Case) -> tuple[Path, Emitted]:
    folder, model, found, chosen = recommended(target, case)
    emitted = TARGETS[target].emit(
        found, chosen, model_path=None if case.directory is None else str(model)
    )
    files = {FILES[target]: emitted.text, **emitted.beside}
    files[LAUNCH] = launch_script(emitted, file=FILES[target], said=[], before=())
    for name, text in files.items():
        (folder / name).write_text(text)
    blocks = [
        json.loads(line.removeprefix("# "))
        for line in emitted.text.splitlines()
        if line.startswith('# {"rope_parameters"')
    ]
    if blocks:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | blocks[0]))
    return folder, emitted


def run(
    target: Target, words: Sequence[str | Path], *, reader: str | None = None
) -> subprocess.CompletedProcess[str]:
    quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONWARNINGS": "ignore"}
    elsewhere = {"MODEL_PATH": str(Path(words[-1], "model")), "DATASET": "/data/prompts"}
    left_out = ("PYTHONPATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    return captured(
        [program_of(target), READERS / (reader or f"read_{target}.py"), *words],
        env=environment | quiet | elsewhere,
    )


@cache
def read(target: Target) -> dict[str, dict[str, Any]]:
    cases = CASES_OF[target]
    folders = [written(target, case)[0] for case in cases.values()]
    done = run(target, folders)  # the last case is the one whose model lies where MODEL_PATH says
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


def block_in(emitted: Emitted) -> dict[str, Any]:
    (line,) = [
        line for line in emitted.text.splitlines() if line.startswith('# {"rope_parameters"')
    ]
    return json.loads(line.removeprefix("# "))


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, cases in CASES_OF.items() for name in cases]
)
def test_the_trainers_own_parser_reads_what_was_recommended(target, name):
    case = CASES_OF[target][name]
    _, model, found, chosen = recommended(target, case)
    parsed = read(target)[name]
    settings, layout = chosen.cell.settings, chosen.cell.layout
    degrees = (layout.ulysses_degree, layout.ring_degree, layout.replicate_degree)
    assert (*degrees, settings.offload) == (case.degree, case.ring, case.copies, case.offload)
    assert parsed["sp"] == layout.context_degree
    assert parsed.get("copies", 1) == layout.replicate_degree
    is_ring = layout.context_degree > 1 if target in RINGS else case.ring > 1
    assert parsed.get("passes_on", is_ring) is is_ring
    if target in ("trl", "axolotl", "ms-swift"):
        is_sdpa = target == "trl" and is_ring
        assert parsed["attention"] == ("sdpa" if is_sdpa else "flash_attention_2")
    assert parsed["offload"] is settings.offload
    assert parsed["gpus"] == found.gpus
    assert parsed.get("recompute", True) is True
    assert not parsed.get("recomputes_twice")
    if target in EVERY_LAYER:
        assert parsed["lora"] is None
    if target in SHARDED:
        assert parsed["strategy"] == "fsdp2"
    if target in ("trinity", "verl"):
        assert parsed["strategy"] == ("fsdp2" if case.offload else "fsdp")
    if target == "areal":
        assert parsed["rollout_gpus"] == 2
    if target != "accelerate":
        assert parsed["budget"] == chosen.token_budget_tokens
        assert (parsed["length"], parsed["path"]) == (found.length_tokens, str(model))
        assert_rope(parsed, found)


def read_alone(target: Target, case: Case) -> dict[str, Any]:
    done = run(target, [written(target, case)[0]])
    assert done.returncode == 0, done.stderr[-3000:]
    (parsed,) = json.loads(done.stdout.splitlines()[-1])
    return parsed


EVERY_LAYER: Mapping[Target, dict[str, Any]] = {
    "trinity": {"targets": "all-linear", "name": "lora", "sent_by": "checkpoint"},
    "verl": {"targets": "all-linear"},
    "areal": {
        "targets": ["all-linear"],
        "served": [True, True],
        "served_rank": 16,
        "name": "default_lora",
        "sent_by": "disk",
    },
    "trl": {"targets": "all-linear", "dropout": 0.0},
    "axolotl": {"targets": "all-linear", "dropout": 0.0},
    "llamafactory": {"targets": ["all"], "dropout": 0.0},
    "ms-swift": {"targets": ["all-linear"], "dropout": 0.0},
    # wqkv of 2560 inputs and 6144 outputs, wo, w1, w2, w3, in 36 layers
    "torchtitan": {
        "targets": ["w2", "w3", "w1", "wo", "wqkv"],
        "trained": 36 * 16 * ((2560 + 6144) + (4096 + 2560) + 3 * (2560 + 9728)),
    },
}
"""What each trainer calls adapters on every linear layer but the head, besides rank and alpha."""
DTYPES = {"verl": "fp32", "areal": "float32", "torchtitan": "float32", "trl": "bfloat16"}
DTYPES |= dict.fromkeys(("axolotl", "llamafactory", "ms-swift"), "bfloat16")


@pytest.mark.parametrize("target", EVERY_LAYER)
def test_adapters_are_read_as_they_were_asked_for(target):
    asked = (("lora", 16), ("lora_alpha", 48))
    parsed = read_alone(target, Case(length="16k", asked=asked, directory=None))
    expected = {"rank": 16, "alpha": 48, **EVERY_LAYER[target]}
    found = parsed["lora"]
    if target == "torchtitan":
        found, expected = (
            {**each, "targets": sorted(each["targets"])} for each in (found, expected)
        )
    assert found == expected
    assert parsed.get("dtype") == DTYPES.get(target)
    assert parsed.get("load_format", "safetensors") == "safetensors"
    assert parsed.get("strategy", "fsdp2") == "fsdp2"


ADAPTERS, LIGERS = ("lora", 16), ("axolotl", "llamafactory", "ms-swift")
HOST = ("activations", "host")
FIELDS: list[tuple[Target, tuple[Any, ...], str, Any]] = [
    *((t, (("optimizer", "adamw-8bit"),), "optim", "adamw_torch_8bit") for t in ("trl", *LIGERS)),
    *(
        (target, (ADAPTERS, ("lora_base", "nf4")), "packed", packed)
        for target, packed in {
            "trl": [True, "nf4", True, "uint8"],
            "axolotl": ["qlora", True],
            "llamafactory": [4, "nf4", True],
            "ms-swift": ["bnb", 4, "nf4"],
        }.items()
    ),
    *((target, (("loss", "chunked"),), "chunked", True) for target in LIGERS),
    *((target, (("recompute", "none"),), "recompute", False) for target in ("axolotl", "ms-swift")),
    ("axolotl", (HOST,), "on_host", "hidden_states"),
    ("verl", (HOST, ("objective", "grpo")), "on_host", True),
    *((target, (HOST,), "on_host", True) for target in ("trl", "accelerate")),
]
"""What is asked of a trainer, and the field in which its own parser has it."""


@pytest.mark.parametrize(("target", "asked", "field", "value"), FIELDS)
def test_what_is_asked_for_is_in_the_trainers_own_field(target, asked, field, value):
    case = Case(gpus=1 if field == "packed" else 4, length="4k", asked=asked)
    assert read_alone(target, case)[field] == value


@pytest.mark.parametrize("target", ["llamafactory", "ms-swift"])
def test_copies_of_a_model_in_nf4_are_ddps_and_recomputed_once(target):
    asked = (ADAPTERS, ("lora_base", "nf4"))
    parsed = read_alone(target, Case(gpus=2, copies=2, length="4k", asked=asked))
    assert (parsed["strategy"], parsed["gpus"]) == ("ddp", 2)
    assert (parsed["recompute"], parsed["recomputes_twice"]) == (True, False)


ATTENTIONS: Mapping[str, Mapping[Target, str]] = {
    "gpt-oss-20b": {"llamafactory": "fa2", **dict.fromkeys(("trl", "axolotl"), "flex_attention")},
    "gemma-4-E2B-text": dict.fromkeys(("trl", *LIGERS), "sdpa"),
}
"""Attentions of models with sinks or with heads that no fused kernel takes."""


@pytest.mark.parametrize(
    ("model", "target"), [(model, target) for model, of in ATTENTIONS.items() for target in of]
)
def test_another_attention_is_one_that_the_trainer_has(model, target):
    asked = (ADAPTERS, ("lora_targets", "q_proj,v_proj"))
    parsed = read_alone(target, Case(length="4k", model=model, asked=asked))
    assert parsed["attention"] == ATTENTIONS[model][target]


def test_a_loss_is_cut_by_what_each_trainer_has_for_a_family():
    assert not any(parsed["chunked"] for target in LIGERS for parsed in read(target).values())
    case = Case(length="8k", asked=(("loss", "chunked"),), model="aya-23-8B")
    assert read_alone("axolotl", case)["cut"] is True
    case = Case(length="40k", asked=(("loss", "chunked"),), directory=None)
    assert read_alone("torchtitan", case)["chunks"] == 20


def test_families_whose_loss_is_fused_are_those_of_the_packages_themselves():
    for target in ("axolotl", "llamafactory"):
        (path,) = program_of(target).parents[1].rglob("liger_kernel/transformers/monkey_patch.py")
        table = path.read_text().partition("MODEL_TYPE_TO_APPLY_LIGER_FN = {")[2].partition("}")[0]
        assert set(re.findall('"([a-z0-9_]+)":', table)) >= LIGER
    (path,) = program_of("llamafactory").parents[1].rglob("model_utils/liger_kernel.py")
    assert LIGER & set(re.findall('"([a-z0-9_]+)"', path.read_text())) == LLAMAFACTORY_FUSES
    (path,) = program_of("axolotl").parents[1].rglob("cut_cross_entropy/README.md")
    cut = set(re.findall("^- ([a-z0-9_]+)$", path.read_text(), re.MULTILINE))
    assert (cut & set(TRAINED)) - LIGER == CUT_CROSS_ENTROPY


@pytest.mark.parametrize("target", ["verl", "areal", "trl", "axolotl", "llamafactory", "ms-swift"])
def test_layers_with_adapters_are_read_by_their_names(target):
    asked = (("lora", 16), ("lora_targets", "q_proj,v_proj"))
    parsed = read_alone(target, Case(length="16k", asked=asked))
    assert parsed["lora"]["targets"] == ["q_proj", "v_proj"]


def assert_rope(parsed: dict[str, Any], found: Recommendation) -> None:
    """Every number of the recommended block; none up to the native length."""
    rope = parsed["rope"] or {"rope_type": "default"}
    if found.yarn is None:
        assert rope["rope_type"] in ("default", "none")
        return
    assert {name: rope[name] for name in found.yarn.rope_parameters} == found.yarn.rope_parameters
    assert parsed.get("longest", found.length_tokens) == found.length_tokens


@pytest.mark.parametrize("name", CASES)
def test_accelerate_says_what_is_the_scripts(name):
    _, _, found, chosen = recommended("accelerate", CASES[name])
    emitted = accelerate(found, chosen)
    assert any(
        f"the token budget of {chosen.token_budget_tokens} a GPU" in each for each in emitted.cannot
    )
    if found.yarn is not None:
        assert block_in(emitted) == found.yarn.block


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("dpo", {"objective": "dpo"}),
        ("reward", {"objective": "rw"}),
        ("grpo", {"objective": "grpo"}),
        ("grpo", {"objective": "grpo", "entropy": "full"}),
        ("grpo", {"objective": "grpo", "rollout": "vllm", "trainer": "trl"}),
    ],
)
def test_each_of_trls_commands_reads_every_name_that_is_written_for_it(command, settings, tmp_path):
    # one GPU: a generation batch is of all processes, and the parser runs in one
    found = recommend(MODEL, length="4k", gpus="1xH200-141GB", **settings)
    assert found.chosen is not None
    emitted = TARGETS["trl"].emit(found, found.chosen, model_path="/models/mine")
    assert emitted.command.startswith(f"trl {command} ")
    for name, text in {FILES["trl"]: emitted.text, **emitted.beside}.items():
        (tmp_path / name).write_text(text)
    done = run("trl", [command, tmp_path], reader="read_trl_command.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (parsed,) = json.loads(done.stdout.splitlines()[-1])
    of_the_launcher = {"accelerate_config"}
    names = {name for name in emitted.values if "." not in name} - of_the_launcher
    assert {name: parsed[name] for name in names} == {name: emitted.values[name] for name in names}


@pytest.mark.parametrize("target", ["trl", "accelerate"])
def test_heads_are_shared_by_zero_3_where_layers_have_windows(target):
    parsed = read_alone(target, WINDOWS)
    assert (parsed["strategy"], parsed["sp"]) == ("zero3", 2)
    if target == "trl":
        assert parsed["attention"] == "flash_attention_2"
        assert parsed["recompute"] is True


@pytest.mark.parametrize("target", ["axolotl", "ms-swift"])
def test_sequences_are_packed_but_where_several_of_them_are_shared(target):
    for name, parsed in read(target).items():
        _, _, _, chosen = recommended(target, CASES_OF[target][name])
        is_several = chosen.cell.settings.sequences_per_micro_batch > 1
        is_padded = target == "axolotl" and is_several and parsed["sp"] > 1
        assert parsed["packs"] is not is_padded


@pytest.mark.parametrize("target", ["trl", "areal", "ms-swift"])
def test_the_allocators_mode_is_in_the_file(target):
    for name, parsed in read(target).items():
        is_set = CASES_OF[target][name].allocator == "expandable"
        assert set(filter(None, parsed["environment"].values())) == (
            {"expandable_segments:True"} if is_set else set()
        )


@pytest.mark.parametrize(
    ("target", "name", "wrong"),
    [
        ("trinity", "max_token_len_per_gpu", "max_tokens_per_gpu"),
        ("verl", "ppo_max_token_len_per_gpu", "ppo_max_tokens_per_gpu"),
        ("areal", "max_tokens_per_mb", "max_tokens"),
        ("trl", "max_length", "longest"),
        ("torchtitan", "seq_len", "length"),
        ("accelerate", "num_processes", "processes"),
        ("axolotl", "sequence_len", "sequence_length"),
        ("llamafactory", "cutoff_len", "cutoff_length"),
        ("ms-swift", "max_length", "longest"),
    ],
)
def test_a_name_that_a_trainer_lacks_is_refused_by_its_parser(target, name, wrong, tmp_path):
    folder, *_ = recommended(target, CASES["past the native length"])
    written(target, CASES["past the native length"])
    shutil.copytree(
        folder, tmp_path / "wrong", ignore=shutil.ignore_patterns("bin", "files", "names")
    )
    path = tmp_path / "wrong" / FILES[target]
    assert name in path.read_text()
    path.write_text(path.read_text().replace(name, wrong))
    done = run(target, [tmp_path / "wrong"])
    assert done.returncode != 0
    assert wrong in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("target", TARGETS)
def test_the_version_that_is_installed_is_the_one_that_is_named(target):
    _, emitted = written(target, CASES["within the native length"])
    package = {"trinity": "trinity-rft"}.get(target, target)
    command = f"import importlib.metadata as each; print(each.version({package!r}))"
    done = subprocess.run(
        [program_of(target), "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == emitted.checked_with
