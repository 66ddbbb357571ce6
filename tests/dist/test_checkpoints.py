"""What a trial saves can be gone on from."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the data plane needs the train extra")

from checkpoint_cases import CASES, COPIED, LENGTH, MODELS, NARROW, REWARD, loading
from logits import TOKENS
from rank_groups import RankGroups
from reference import save_models
from safetensors import safe_open
from safetensors.torch import load_file

from tables import deep

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("checkpoints")]

CASES_OF = "checkpoint_cases"

SUMMATION = 1e-12
"""Norm-relative, float64: another number of processes sums gradients in another order."""
FLOAT32 = 5e-6
"""Norm-relative: attention and norms of the engine, or of another version, in another order."""
TRANSFORMERS_4 = Path(__file__).parents[2] / ".venv-transformers4" / "bin" / "python"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: RankGroups) -> Path:
    """Models with and without weights, and what two processes save of them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_models(folder / "weights")
    shutil.copytree(folder / "weights" / "tied", folder / "weights" / REWARD)
    for name in MODELS:
        source = folder / "weights" / name
        (source / "tokenizer_config.json").write_text('{"model_max_length": 64}')
        (source / "notes.txt").write_text("not a tokenizer's")
        (folder / "configs" / name).mkdir(parents=True)
        shutil.copyfile(source / "config.json", folder / "configs" / name / "config.json")
    ranks.results(CASES_OF, 2, "save", folder)
    ranks.results(CASES_OF, 2, "hf", folder)
    return folder


def deviation(a: "torch.Tensor", b: "torch.Tensor") -> float:
    return float((a - b).double().norm() / b.double().norm()) if b.norm() else float((a - b).norm())


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 2), (2, 1), *deep((1, 1), (1, 2))])
def test_training_goes_on_from_the_shards_as_if_it_had_never_stopped(
    folder, ranks, saved_by, resumed_by
):
    if not (folder / f"went-on-{CASES[0]}-{saved_by}").exists():
        ranks.results(CASES_OF, saved_by, "save", folder)
    ranks.results(CASES_OF, resumed_by, "resume", folder, str(saved_by))
    for case in CASES:
        went_on = load_file(folder / f"went-on-{case}-{saved_by}")
        resumed = load_file(folder / f"resumed-{case}-{saved_by}-{resumed_by}")
        assert set(resumed) == set(went_on)
        for key, expected in went_on.items():
            if resumed_by == saved_by:
                assert torch.equal(resumed[key], expected), (case, key)
            else:
                assert deviation(resumed[key], expected) < SUMMATION, (case, key)


def test_copies_write_each_shard_once_and_others_go_on_from_them(folder, ranks):
    ranks.results(CASES_OF, 4, "save-copies", folder)
    ranks.results(CASES_OF, 4, "resume-copies", folder, "4")
    ranks.results(CASES_OF, 2, "resume-copies", folder, "2")
    for case in COPIED:
        went_on = load_file(folder / f"went-on-{case}-4")
        resumed = load_file(folder / f"resumed-{case}-4-4")
        by_two = load_file(folder / f"resumed-{case}-2-2")
        without = load_file(folder / f"went-on-{case}-2")
        assert set(went_on) == set(resumed) == set(by_two) == set(without)
        for key, expected in went_on.items():
            assert torch.equal(resumed[key], expected), (case, key)
            assert deviation(expected, without[key]) < SUMMATION, (case, key)
            assert deviation(by_two[key], without[key]) < SUMMATION, (case, key)
        sizes = (
            sum(path.stat().st_size for path in (folder / f"sharded-{case}-{count}").iterdir())
            for count in (4, 2)
        )
        of_copies, of_shards = sizes
        assert abs(of_copies - of_shards) < 4096 * len(went_on)


@pytest.mark.parametrize("loaded_by", [2, 1, *deep(4)])
def test_what_the_engine_loads_is_what_was_saved_bit_by_bit(folder, ranks, loaded_by):
    ranks.results(CASES_OF, loaded_by, "load", folder, "2")
    for case in CASES:
        for strategy in loading(case, loaded_by):
            assert_loaded(folder, case, strategy, 2, loaded_by)


def test_copies_load_what_shards_saved_and_shards_what_copies_saved(folder, ranks):
    if not (folder / f"saved-{COPIED[0]}-4").exists():
        ranks.results(CASES_OF, 4, "save-copies", folder)
    ranks.results(CASES_OF, 4, "load-copies", folder, "2")
    ranks.results(CASES_OF, 2, "load-copies", folder, "4")
    for case in COPIED:
        assert_loaded(folder, case, "fsdp2", 2, 4)
        assert_loaded(folder, case, "fsdp2", 4, 2)


def assert_loaded(folder: Path, case: str, strategy: str, saved_by: int, loaded_by: int) -> None:
    saved = load_file(folder / f"saved-{case}-{saved_by}")
    loaded = load_file(folder / f"loaded-{case}-{strategy}-{saved_by}-{loaded_by}")
    assert set(loaded) == set(saved)
    for key, expected in saved.items():
        assert loaded[key].dtype == expected.dtype, (case, strategy, key)
        assert torch.equal(loaded[key], expected), (case, strategy, key)
        assert expected.any() or "lm_head" in key or "router" in key, (case, key)


def test_copies_save_the_weights_that_others_save(folder, ranks, tmp_path):
    (tmp_path / "weights").symlink_to(folder / "weights")
    ranks.results(CASES_OF, 4, "hf-copies", tmp_path)
    for case in COPIED:
        paths = sorted((tmp_path / f"hf-{case}").glob("*.safetensors"))
        assert len(paths) > 1
        for path in paths:
            expected = load_file(folder / f"hf-{case}" / path.name)
            saved = load_file(path)
            assert set(saved) == set(expected)
            for key, tensor in saved.items():
                assert deviation(tensor, expected[key]) < FLOAT32, (case, key)


def test_shards_take_the_bytes_that_the_free_disk_is_asked_for(folder):
    """Float64 here: twice 12 bytes a parameter, a tied head counted once."""
    for case in CASES:
        weights = load_file(folder / f"went-on-{case}-2")
        parameters = sum(tensor.numel() for key, tensor in weights.items() if " " not in key)
        written = sum(path.stat().st_size for path in (folder / f"sharded-{case}-2").iterdir())
        headers = 4096 * len(weights)
        assert 24 * parameters <= written < 24 * parameters + headers


@pytest.fixture(scope="module")
def loaded(folder: Path, ranks: RankGroups) -> dict[str, "torch.Tensor"]:
    """By case, the logits of its saved directory, loaded by this project's transformers."""
    out = folder / "logits.safetensors"
    ranks.run("logits.py", 1, out, *saved_directories(folder))
    return by_case(out)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(REWARD)])
def test_a_saved_directory_has_the_logits_of_the_model_in_memory(case, folder, loaded):
    expected = load_file(folder / f"expected-{case}.safetensors")
    assert torch.equal(loaded[case], expected["logits"])
    labels = torch.tensor(TOKENS[1:])[:, None]
    logprobs = loaded[case][:-1].log_softmax(-1).gather(1, labels)[:, 0]
    assert deviation(logprobs, expected["engine"]) < FLOAT32


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(REWARD)])
def test_a_saved_reward_model_is_a_classifier_with_a_score_of_the_last_token(case, folder, loaded):
    expected = load_file(folder / f"expected-{case}.safetensors")
    assert loaded[case].shape == (1,)
    assert torch.equal(loaded[case], expected["logits"])
    assert deviation(loaded[case], expected["engine"]) < FLOAT32
    config = json.loads((folder / f"hf-{case}" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert not config["tie_word_embeddings"]
    (weights,) = [
        path
        for path in (folder / f"hf-{case}").glob("*.safetensors")
        if "score.weight" in load_file(path)
    ]
    assert load_file(weights)["score.weight"].shape == (1, config["hidden_size"])


def test_transformers_4_57_reads_the_same_logits_from_it(folder, tmp_path):
    """Leaves what docs/results/checkpoints shows in ``transformers4.json``."""
    if not TRANSFORMERS_4.exists():
        assert "transformers4" not in os.environ.get("HIGHWATER_REQUIRE", ""), (
            f"there is no {TRANSFORMERS_4}"
        )
        pytest.skip("`make .venv-transformers4/.ready` installs transformers 4.57")
    loaded = logits(TRANSFORMERS_4, folder, tmp_path / "logits.safetensors")
    with safe_open(tmp_path / "logits.safetensors", framework="pt") as file:
        versions = file.metadata()
    assert versions["transformers"].startswith("4.57.")
    found = {
        case: deviation(loaded[case], load_file(folder / f"expected-{case}.safetensors")["logits"])
        for case in CASES
    }
    written = {
        "written_by_transformers": transformers.__version__,
        "read_by": versions,
        "deviation_norm_relative": found,
    }
    (tmp_path / "transformers4.json").write_text(json.dumps(written, indent=1) + "\n")
    assert max(found.values()) < FLOAT32


def logits(python: Path, folder: Path, out: Path) -> dict[str, "torch.Tensor"]:
    script = str(Path(__file__).with_name("logits.py"))
    words = [str(python), script, str(out), *saved_directories(folder)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return by_case(out)


def saved_directories(folder: Path) -> list[str]:
    return [str(folder / f"hf-{case}") for case in CASES]


def by_case(out: Path) -> dict[str, "torch.Tensor"]:
    return {name.removeprefix("hf-"): tensor for name, tensor in load_file(out).items()}


def test_a_saved_directory_says_its_rope_in_the_words_of_both_versions(folder):
    config = json.loads((folder / "hf-moe-fsdp2" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": LENGTH / 64, "original_max_position_embeddings": 64}
    assert config["rope_scaling"] == yarn
    assert config["rope_parameters"] == {**yarn, "rope_theta": config["rope_theta"]}
    assert config["max_position_embeddings"] == LENGTH
    assert config["num_experts"] == config["num_local_experts"] == 6
    assert (config["dtype"], config["use_cache"]) == ("float32", True)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.parametrize("case", CASES)
def test_weights_lie_in_files_of_bounded_size_each_tensor_once_with_an_index(folder, case):
    directory, name = folder / f"hf-{case}", case.partition("-")[0]
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {key: path.name for path in files for key in load_file(path)}
    assert found == index["weight_map"]
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in files]
    assert sum(sizes) == index["metadata"]["total_size"]
    owners = [{key.partition(".experts.")[0] for key in load_file(path)} for path in files]
    assert all(size <= NARROW or len(owner) == 1 for size, owner in zip(sizes, owners, strict=True))
    assert ("lm_head.weight" in found) == (name in ("dense", "moe"))
    assert any(".experts.5.gate_proj.weight" in key for key in found) == (name == "moe")


@pytest.mark.parametrize("case", CASES)
def test_the_tokenizers_files_go_along_and_nothing_else(folder, case):
    beside = {
        path.name for path in (folder / f"hf-{case}").iterdir() if path.suffix != ".safetensors"
    }
    assert beside == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer_config.json",
    }
