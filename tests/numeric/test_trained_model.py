"""The model of a trial: its dtypes, its RoPE past the native length, its batches."""

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from closeness import deviation
from engine_models import on_meta, tiny_training
from highwater.engine.attention.registry import register
from highwater.engine.data.batches import UNTRAINED, Batch, Document, batches, pack
from highwater.engine.models.build import build_on_meta, read_config
from highwater.engine.models.fused.fused import fuse_norms
from highwater.engine.models.rope import scale_rope
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import backward_of
from highwater.errors import ModelError, UsageError
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from tables import table
from tiny_models import SIZES
from trial_specs import trial_in


def test_master_parameters_are_float32_whatever_the_config_says():
    model = on_meta(Qwen3Config(**SIZES, dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_past_the_native_length_yarn_has_the_factor_of_the_lengths_and_keeps_theta():
    config = Qwen3Config(
        max_position_embeddings=40_960, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    scale_rope(config, length_tokens=131_072, rope="auto")
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 131_072 / 40_960,
        "original_max_position_embeddings": 40_960,
    }


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("falcon_h1", "layers of hybrid"),
        ("jamba", "layers of linear_attention"),
        ("minimax", "layers of linear_attention"),
    ],
)
def test_a_family_that_mixes_tokens_outside_attention_is_refused_by_name(family, said, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": family, "num_hidden_layers": 8, "vocab_size": 64})
    )
    config = read_config(str(tmp_path), length_tokens=64, rope="auto")
    with pytest.raises(ModelError, match=f"{family}.*({said})"):
        on_meta(config)


def test_two_models_in_one_process_keep_their_calls_apart():
    models = [on_meta(Qwen3Config(**SIZES)) for _ in range(2)]
    ids = torch.zeros(4, dtype=torch.long)
    for model in models:
        model.to_empty(device="cpu")(ids, torch.arange(4), ids[:1], ids[:1], (4,))
    assert [len(model.attention.callers) for model in models] == [2, 2]


def test_layers_that_do_not_call_our_attention_are_an_error_and_not_a_loss():
    elsewhere = dataclasses.replace(register("flash"), name="sdpa")
    model = build_on_meta(
        Qwen3Config(**SIZES), attention=elsewhere, loss="full", master_dtype=torch.float32
    ).to_empty(device="cpu")
    ids = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ModelError, match="0 of its 2 layers"):
        model(ids, ids, ids[:1], ids[:1], (4,))


def test_norms_are_fused_under_the_same_names_and_compute_the_same():
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    fused = copy.deepcopy(plain)
    assert fuse_norms(fused) == 2 * 4 + 1
    assert {name for name, _ in fused.named_parameters()} == {
        name for name, _ in plain.named_parameters()
    }
    ids = torch.randint(64, (1, 9))
    for model in (plain, fused):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, theirs), (_, ours) in zip(
        plain.named_parameters(), fused.named_parameters(), strict=True
    ):
        assert deviation(ours.grad, theirs.grad) < 5e-6, name


def test_a_norm_that_adds_1_to_its_weight_is_replaced_by_one_that_does():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    theirs = GemmaRMSNorm(16)
    torch.nn.init.normal_(theirs.weight, std=0.1)
    model = torch.nn.ModuleDict({"norm": theirs})
    assert fuse_norms(model) == 1
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    assert torch.equal(model["norm"](x), theirs(x)), "in bfloat16 too, where 1 + weight has no room"
    assert model["norm"].weight is theirs.weight


def test_a_norm_that_computes_something_else_is_left_alone():
    class TwiceRMSNorm(torch.nn.Module):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(size)), eps

        def forward(self, x):
            return 2 * torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight)

    model = torch.nn.ModuleDict({"norm": TwiceRMSNorm(16)})
    assert fuse_norms(model) == 0
    assert isinstance(model["norm"], TwiceRMSNorm)


def test_packing_trains_no_first_token_and_counts_positions_anew():
    first, second = torch.tensor([5, 6, 7]), torch.tensor([8, 9])
    batch = pack([Document(first, first), Document(second, torch.tensor([8, UNTRAINED]))])
    assert batch.document_lengths == (3, 2)
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1]
    assert (batch.labels_N.tolist(), batch.trained_positions_N.tolist()) == ([6, 7], [0, 1])


@pytest.mark.parametrize(("length", "prompt"), [(2, 1), (101, 50), (4096, 2048), (10_000, 2048)])
def test_a_synthetic_sequence_has_the_length_and_trains_the_response_alone(length, prompt):
    batch = next(batches(spec(length_tokens=length), vocab_size=11, data_rank=0))
    assert len(batch.input_ids_T) == length
    assert len(batch.labels_N) == length - max(prompt, 1)
    assert int(batch.trained_positions_N[0]) == max(prompt, 1) - 1


def test_a_trials_rewards_are_random_and_a_document_without_one_has_0():
    """With rewards of 0 each advantage is 0, and the policy's term would train nothing."""
    rewards = next(
        batches(spec(settings=Settings(sequences_per_micro_batch=8)), vocab_size=11, data_rank=0)
    ).rewards
    assert len(set(rewards)) == 8
    ids = torch.arange(4)
    assert pack([Document(ids, ids)]).rewards == (0.0,)


@pytest.mark.parametrize("objective", ["sft", "grpo", "ppo", "rw", "dpo"])
def test_a_step_generates_nothing_each_model_goes_once_over_each_micro_batch(objective, tmp_path):
    rows = batches(spec(settings=Settings(sequences_per_micro_batch=2)), vocab_size=64, data_rank=0)
    micro_batches = [next(rows) for _ in range(3)]
    seen: dict[str, list[Sequence[int]]] = {}
    with process_mesh.alone(torch.device("cpu")):
        training = tiny_training(tmp_path, objective)
        for name in ("policy", "reference"):
            model = getattr(training, name)
            if model is not None:
                seen[name] = []
                model.register_forward_pre_hook(
                    lambda _, inputs, kept=seen[name]: kept.append(inputs[0].tolist())
                )
        backward_of(training, micro_batches)
    assert set(seen) == {"policy", *(["reference"] if objective in ("grpo", "dpo") else [])}
    for tokens in seen.values():
        assert tokens == [batch.input_ids_T.tolist() for batch in micro_batches]


@pytest.mark.parametrize(("sequences", "seed"), [(1, 0), (2, 7)])
def test_a_step_has_the_same_sequences_on_any_number_of_ranks(sequences, seed):
    of_layouts = [
        [
            {(*row.tolist(), reward) for batch in step for row, reward in _sequences(batch)}
            for step in _steps(ranks, micro_batches=12 // ranks, sequences=sequences, seed=seed)
        ]
        for ranks in (1, 2, 3, 4)
    ]
    first, second = of_layouts[0]
    assert all(layout == [first, second] for layout in of_layouts)
    assert len(first | second) == 2 * 12 * sequences, "no two are alike"


def _steps(ranks: int, *, micro_batches: int, sequences: int, seed: int) -> list[list[Batch]]:
    each = msgspec.structs.replace(
        spec(settings=Settings(sequences_per_micro_batch=sequences)),
        layout=Layout(gpus=ranks),
        seed=seed,
    )
    sources = [batches(each, vocab_size=1000, data_rank=rank) for rank in range(ranks)]
    return [[next(source) for source in sources for _ in range(micro_batches)] for _ in range(2)]


def _sequences(batch: Batch) -> list[tuple[torch.Tensor, float]]:
    assert set(batch.groups) == {0}
    return list(zip(batch.input_ids_T.split(batch.document_lengths), batch.rewards, strict=True))


@pytest.mark.parametrize(
    ("source", "said"), table("trained_model", "a_users_batches_that_cannot_be_trained_on")
)
def test_a_users_batches_that_cannot_be_trained_on_are_refused(source, said, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.raises(UsageError, match=said):
        next(batches(spec(data=f"user_batches:{source}"), vocab_size=11, data_rank=0))


def test_a_document_longer_than_a_sequence_is_refused_though_the_row_has_its_tokens(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    two = Settings(sequences_per_micro_batch=2)
    with pytest.raises(UsageError, match=r"128 tokens .* 64") as refusal:
        next(
            batches(spec(data="user_batches:two_as_one", settings=two), vocab_size=11, data_rank=0)
        )
    assert "`128` or more" in refusal.value.hint
    row = next(batches(spec(data="user_batches:uneven", settings=two), vocab_size=11, data_rank=0))
    assert row.document_lengths == (56, 56, 16)


def test_documents_are_held_to_a_sliding_window_and_the_row_is_not(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    within, past = (
        batches(spec(data="user_batches:good"), vocab_size=11, data_rank=0, window_tokens=n)
        for n in (34, 33)
    )
    assert sum(next(within).document_lengths) == 64
    with pytest.raises(UsageError, match=r"34 tokens, .* window of 33 "):
        next(past)


def test_a_users_batches_are_trained_on_as_they_come(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    source = batches(spec(data="user_batches:good"), vocab_size=11, data_rank=0)
    assert next(source).document_lengths == (30, 34)
    assert next(source).labels_N.tolist() == [4]
    assert next(source).old_logprobs_N.tolist() == [-0.5]
    assert next(source).document_lengths == (30, 34), "a source that ends is read again"


def test_what_the_first_tokens_logprob_is_does_not_matter(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    row = next(batches(spec(data="user_batches:first_logprob_unknown"), vocab_size=11, data_rank=0))
    assert row.old_logprobs_N.tolist() == [-0.5] * 63


def spec(
    *, length_tokens: int = 64, data: str | None = None, settings: Settings | None = None
) -> TrialSpec:
    return trial_in(
        "/nowhere", settings=settings or Settings(), length_tokens=length_tokens, data=data
    )
