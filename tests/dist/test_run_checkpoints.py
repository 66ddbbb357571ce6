"""A run goes on from its checkpoint as if it had never stopped, or is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rank_groups import RankGroups
from run_checkpoint_cases import CASES, LOSSY, SAVED, WAYS, ways_of
from safetensors.torch import load_file
from test_checkpoints import deviation
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("run-checkpoints")]

CASES_OF = "run_checkpoint_cases"
FLOAT32 = 1e-6
"""Norm-relative, of weights; absolute, of losses, which PPO's is none of: another number of
processes sums gradients in another order."""
MOMENTS = 1e-5
"""Norm-relative: gradients of a few tokens, whose sums cancel."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: RankGroups) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ranks.results(CASES_OF, 2, "save", folder)
    return folder


@pytest.mark.parametrize(
    ("resumed_by", "ways"),
    [
        (2, ("shards", "fsdp1", "states", "offload")),
        (1, ("shards", "fsdp1")),
        (4, ("shards", "copies")),
    ],
)
def test_a_run_goes_on_from_its_checkpoint_as_if_never_stopped(folder, ranks, resumed_by, ways):
    assert set(ways) <= set(WAYS)
    ranks.results(CASES_OF, resumed_by, "resume", folder, "2", *ways)
    for case in CASES:
        saved, went_on = (load_file(folder / f"{what}-{case}-2") for what in ("saved", "went-on"))
        for way in ways_of(case, ways):
            place = f"{case}-{way}-2-{resumed_by}"
            loaded = load_file(folder / f"loaded-{place}")
            assert set(loaded) == set(saved)
            for key, expected in saved.items():
                assert torch.equal(loaded[key], expected), (place, key)
                assert not key.endswith(" step") or expected.tolist() == [SAVED]
            resumed = load_file(folder / f"resumed-{place}")
            if way == "fsdp1":
                for key, expected in load_file(folder / f"read-again-{place}").items():
                    assert torch.equal(resumed[key], expected), (place, key)
            is_same_order = resumed_by == 2 and way in ("shards", "states", "offload")
            for key, expected in went_on.items():
                if key == "losses" and not is_same_order:
                    assert (resumed[key] - expected).abs().max() < FLOAT32, place
                elif is_same_order:
                    assert torch.equal(resumed[key], expected), (place, key)
                else:
                    bound = MOMENTS if "exp_avg" in key else FLOAT32
                    assert deviation(resumed[key], expected) < bound, (place, key)
    for case in LOSSY if resumed_by == 2 else ():
        assert_same_states(folder, case, f"{case}-2-2")


def assert_same_states(folder: Path, case: str, place: str) -> None:
    saved, loaded = load_file(folder / f"saved-{case}-2"), load_file(folder / f"loaded-{place}")
    for key, expected in saved.items():
        assert torch.equal(loaded[key], expected), (place, key)


@pytest.mark.skipif(not LOSSY, reason="moments of few bits need the low-bit extra")
def test_moments_of_few_bits_go_along_where_no_number_is_rounded_or_are_refused(folder, ranks):
    """Halves of a matrix of 4096 numbers have moments in float32, and it has them in 8 bits;
    quarters of none of these are in 8 bits.
    """
    if not (folder / "refused-adamw-8bit-2-1.json").exists():
        ranks.results(CASES_OF, 1, "resume", folder, "2", "shards")
    if not (folder / "loaded-adamw-8bit-2-4").exists():
        ranks.results(CASES_OF, 4, "resume", folder, "2", "shards")
    for count in (1, 4):
        assert_same_states(folder, "adamw-bf16", f"adamw-bf16-2-{count}")
    assert_same_states(folder, "adamw-8bit", "adamw-8bit-2-4")
    ((problem, hint),) = json.loads((folder / "refused-adamw-8bit-2-1.json").read_text())
    assert "8 bits" in problem
    assert "q_proj" in problem
    assert "float32" in problem
    assert "as many GPUs" in hint


def test_all_ranks_refuse_a_checkpoint_of_which_one_reads_a_damaged_file(folder, ranks):
    run = folder / "run-tied-2" / "checkpoints"
    target = folder / "damaged" / "checkpoints"
    shutil.copytree(run, target)
    (shard,) = target.glob("*/model/__1_0.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    ranks.results(CASES_OF, 2, "damaged", folder)
    first, second = json.loads((folder / "damaged.json").read_text())
    assert first == second
    assert str(shard) in first[0]
    assert f"mv {target}" in first[1]


def test_ranks_export_a_model_once_and_none_over_another(folder, ranks):
    ranks.results(CASES_OF, 2, "export", folder)
    out = folder / "out" / "model"
    first, second = json.loads((folder / "exported.json").read_text())
    assert first == second
    assert f"mv {out}" in first[1]
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
