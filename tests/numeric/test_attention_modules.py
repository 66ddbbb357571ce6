"""Dilated attention against a dense softmax in float64 that counts how often tokens meet keys; the
modules for other people's models, and the interface of transformers.
"""

import copy
import importlib
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_near, with_gradients
from highwater import (
    BlockSparseAttention,
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    SparsePatternConfig,
    register_block_sparse,
)
from highwater.engine.attention import block_gather, modules
from highwater.engine.attention.block_gather import block_sparse_attention
from highwater.engine.attention.dilated import dilated_attention
from highwater.errors import ModelError, UsageError
from references.sparse_masks import dense, meetings

TOLERANCE = 1e-10
EAGER = 4 * torch.finfo(torch.float32).eps
"""Of transformers' eager attention, whose softmax is in float32 whatever the model is in."""
BRANCHES = (((16,), (1,)), ((20, 40), (1, 2)), ((4, 16, 64), (1, 2, 4)), ((7, 20), (3, 5)))
BLOCK = 4


def tensors(length: int, heads: tuple[int, int], batch: int = 2, size: int = 6) -> list[Tensor]:
    torch.manual_seed(length)
    shapes = [(batch, length, count, size) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def kept_blocks(length: int, kept: float = 0.4) -> Tensor:
    """Whether a token sees a key, by ``dilated_sparse``: of the blocks up to a row's own the share
    that is kept, rounded up, each as far behind the one before it; from the definition.
    """
    seen = torch.zeros(length, length, dtype=torch.bool)
    for row in range(-(-length // BLOCK)):
        count = 1
        while count < kept * (row + 1) - 1e-9:
            count += 1
        for number in range(count):
            column = row - number * ((row + 1) // count)
            rows, columns = (slice(each * BLOCK, each * BLOCK + BLOCK) for each in (row, column))
            seen[rows, columns] = True
    return seen.tril()


def assert_equal(module: nn.Module, inputs: list[Tensor], count: Tensor, **settings: bool) -> None:
    found = with_gradients([module(*inputs, **settings)], inputs)
    by_heads = (each.transpose(1, 2) for each in inputs)
    expected, _ = dense(*by_heads, count, inputs[0].shape[-1] ** -0.5)
    assert_near(found, with_gradients([expected.transpose(1, 2)], inputs), TOLERANCE, beside=1)


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("length", [1, 37, 64])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 2)])
def test_dilated_and_block_sparse_are_one_softmax_over_what_both_keep(branches, length, heads):
    config = SparsePatternConfig(sparsity_ratio=0.4, block_size=BLOCK)
    module = BlockSparseRingDilatedAttention(*branches, config)
    assert_equal(module, tensors(length, heads), meetings(length, heads[0], branches, kept_blocks))


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_dilated_attention_has_no_pattern_by_any_kernel(is_causal, is_fused, monkeypatch):
    monkeypatch.setattr(modules, "is_fused", lambda query: is_fused)
    branches = ((7, 20), (1, 2))
    count = meetings(37, 4, branches)
    count = count if is_causal else count.tril(-1).mT + count
    assert_equal(DilatedAttention(*branches), tensors(37, (4, 2)), count, is_causal=is_causal)


def test_memory_of_segments_and_patterns_is_linear_in_the_length(monkeypatch):
    """Four times the tokens, of which each row keeps as many, take four times the memory, forward
    and backward: some thirty times what the queries are, and no scores of all rows.
    """
    monkeypatch.setattr(block_gather, "SCORES_AT_HAND", 2**16)
    config = SparsePatternConfig(pattern_type="local_window", local_window_size=64, block_size=32)
    module = BlockSparseRingDilatedAttention([1024, 2048], [1, 2], config)
    short, long = (peak_bytes(module, length) for length in (4096, 16_384))
    assert long < 4.1 * short
    assert long < 40 * 16_384 * 2 * 16 * 4


def peak_bytes(module: nn.Module, length: int) -> int:
    q, k, v = (torch.randn(1, length, 2, 16, requires_grad=True) for _ in range(3))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        module(q, k, v).sum().backward()
    events = profile.profiler.kineto_results.events()
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


@pytest.mark.parametrize("pattern_type", ["strided", "global_local", "block_top_k"])
def test_packed_documents_are_what_each_is_alone(pattern_type):
    lengths = (5, 5, 31, 1, 5, 22)
    config = SparsePatternConfig(
        pattern_type=pattern_type, block_size=BLOCK, local_window_size=6, global_tokens=3
    )
    inputs = tensors(sum(lengths), (4, 2))
    module = BlockSparseAttention(config)
    packed = module(*inputs, document_lengths=lengths)
    alone = torch.cat(
        [module(*each) for each in zip(*(t.split(lengths, dim=1) for t in inputs), strict=True)],
        dim=1,
    )
    assert_near(with_gradients([packed], inputs), with_gradients([alone], inputs), TOLERANCE)


def test_the_share_of_packed_documents_is_of_the_pairs_within_them():
    q, k, v = (t.transpose(1, 2) for t in tensors(16 + 16 + 32, (2, 2)))
    config = SparsePatternConfig(sparsity_ratio=1.0, block_size=BLOCK)
    found = block_sparse_attention(
        q, k, v, pattern=config, scaling=1.0, document_lengths=(16, 16, 32)
    )
    assert found.kept_share == 1.0


@pytest.mark.parametrize("parallel", [False, True])
def test_the_published_example_runs_with_its_import_changed(parallel):
    """Its lines, at a length for the CPU, whose autocast has bfloat16."""
    length, num_heads, head_dim = 2048, 2, 32
    sparse = SparsePatternConfig(pattern_type="dilated_sparse", sparsity_ratio=0.02, block_size=256)
    model = BlockSparseRingDilatedAttention(
        segment_lengths=[length // 2, length], dilation_rates=[1, 2], sparse_config=sparse
    )
    if parallel:
        model = nn.DataParallel(model)
    model = model.to("cpu", torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        q = torch.randn(1, length, num_heads, head_dim, dtype=torch.bfloat16)
        k, v = q, q
        output = model(q, k, v)
    assert (output.shape, output.dtype) == (q.shape, q.dtype)
    wide = model(*(each.double() for each in (q, k, v)))
    assert (output - wide).norm() < 4 * torch.finfo(q.dtype).eps * wide.norm()


@pytest.mark.parametrize(
    "module",
    [
        DilatedAttention([16, 32], [1, 2]),
        BlockSparseAttention(SparsePatternConfig(block_size=BLOCK)),
        BlockSparseRingDilatedAttention([16, 32], [1, 2], SparsePatternConfig(block_size=BLOCK)),
    ],
)
def test_autocast_rounds_inputs_and_nothing_else(module):
    """As PyTorch's own attention: forward and backward are those of the rounded inputs."""
    inputs = [t.detach().float().requires_grad_() for t in tensors(64, (4, 2))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients([module(*inputs)], inputs)
    assert found[0].dtype == torch.bfloat16
    wide = [t.detach().bfloat16().double().requires_grad_() for t in inputs]
    wanted = with_gradients([module(*wide)], wide, rounded=torch.bfloat16)
    assert_near(found, wanted, 4 * torch.finfo(torch.bfloat16).eps)


def test_replicas_in_threads_do_not_disturb_each_other():
    """As DataParallel's replicas: copies of one module, at once, of other lengths each."""
    module = BlockSparseRingDilatedAttention(
        [16, 32], [1, 2], SparsePatternConfig(pattern_type="random", block_size=BLOCK)
    )
    inputs = [[t.detach() for t in tensors(60 + number, (4, 2))] for number in range(12)]
    alone = [module(*each) for each in inputs]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(lambda each: copy.copy(module)(*each), inputs))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(at_once, alone, strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DilatedAttention([16], [1], attention_dropout=0.1), "no dropout"),
        (lambda: DilatedAttention([16], [1], op=object()), "xformers"),
        (
            lambda: BlockSparseRingDilatedAttention(
                [16], [1], SparsePatternConfig(pattern_type="block_top_k")
            ),
            "block_top_k chooses keys by what is in them",
        ),
        (lambda: BlockSparseAttention()(*tensors(8, (2, 2)), is_causal=False), "is_causal=False"),
        (lambda: BlockSparseAttention()(*tensors(8, (3, 2))), "queries, keys and values of shapes"),
        (lambda: BlockSparseAttention()(*tensors(0, (2, 2))), "queries, keys and values of shapes"),
        (lambda: DilatedAttention([2.5], [1]), "segment lengths"),
        (lambda: DilatedAttention([16], [1], normalisation="group"), "is none of softmax, groups"),
        (lambda: BlockSparseAttention(implementation="nope"), "is none of auto, gather, flex"),
        (lambda: BlockSparseAttention(shares="nope"), "is none of contiguous, zigzag"),
        *(
            (
                lambda lengths=lengths: BlockSparseAttention()(
                    *tensors(8, (2, 2)), document_lengths=lengths
                ),
                f"document_lengths {said}",
            )
            for lengths, said in (
                ((1, 2), "add up to 3, and a sequence has 8"),
                ((8, 0), ""),
                ((12, -4), ""),
                ((4.0, 4), ""),
            )
        ),
        *(
            (lambda fields=fields: SparsePatternConfig(**fields), said)
            for fields, said in (
                ({"pattern_type": "local-window"}, "'local-window' is none of local_window"),
                ({"sparsity_ratio": "foo"}, "share of key blocks"),
                ({"sparsity_ratio": True}, "share of key blocks"),
                ({"block_size": 3.5}, "block_size is 3.5"),
                ({"block_size": "128"}, "block_size is '128'"),
                (
                    {"pattern_type": "local_window", "sparsity_ratio": "adaptive"},
                    "the window of local_window says",
                ),
            )
        ),
    ],
)
def test_what_is_not_computed_is_refused(make, said):
    assert callable(make)
    with pytest.raises(UsageError, match=said):
        make()


def test_a_pattern_takes_the_published_fields_in_their_order_with_their_defaults():
    assert SparsePatternConfig("global_local", None, 64, 256, 32) == SparsePatternConfig(
        pattern_type="global_local", block_size=64, local_window_size=256, global_tokens=32
    )
    usual = SparsePatternConfig()
    assert usual.ratio_at(4096) == 0.1
    assert (usual.block_size, usual.local_window_size, usual.global_tokens) == (128, 512, 64)


def tiny_llama(attention: str, **settings: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **sizes | settings)
    config._attn_implementation = attention
    return LlamaForCausalLM(config).double()


def test_a_llama_that_keeps_all_has_eager_logits_and_gradients():
    name = register_block_sparse(SparsePatternConfig(sparsity_ratio=1.0, block_size=BLOCK))
    assert name == "highwater_block_sparse"
    eager, ours = tiny_llama("eager"), tiny_llama(name)
    ids = torch.randint(64, (3, 37))
    logits = [model(input_ids=ids, use_cache=False).logits for model in (eager, ours)]
    assert (logits[0] - logits[1]).norm() <= EAGER * logits[0].norm()
    for made in logits:
        made.square().sum().backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= EAGER * theirs.grad.norm()


@pytest.mark.parametrize("told_by", ["positions", "cumulative lengths"])
def test_packed_documents_of_a_llama_are_what_each_is_alone(told_by):
    config = SparsePatternConfig(pattern_type="strided", sparsity_ratio=0.3, block_size=BLOCK)
    model = tiny_llama(register_block_sparse(config, name="highwater_strided"))
    lengths = (5, 31, 1, 22)
    ids = torch.randint(64, (1, sum(lengths)))
    told = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    if told_by == "cumulative lengths":
        cumulative = torch.tensor([0, *lengths]).cumsum(0).int()
        told |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative}
    packed = model(input_ids=ids, use_cache=False, **told).logits
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    alone = torch.cat(parts, dim=1)
    assert (packed - alone).norm() <= TOLERANCE * alone.norm()


def test_sequences_of_other_documents_each_are_told_apart():
    model = tiny_llama(register_block_sparse(SparsePatternConfig(block_size=BLOCK)))
    ids = torch.randint(64, (2, 12))
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    both = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    for row in range(2):
        one = model(input_ids=ids[row : row + 1], position_ids=positions[row : row + 1]).logits
        assert (both[row] - one[0]).norm() <= TOLERANCE * one.norm()


@pytest.mark.parametrize(
    ("settings", "inputs", "said"),
    [
        ({}, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "padding"),
        ({}, {"attention_mask": torch.zeros(1, 1, 6, 6)}, "a mask of its own"),
        ({"attention_dropout": 0.5}, {}, "dropout"),
        ({}, {"cu_seq_lens_q": torch.tensor([0, 3])}, "documents of"),
        ({}, {"is_causal": False}, "no causal order"),
    ],
)
def test_what_a_model_asks_for_beyond_is_refused(settings, inputs, said):
    model = tiny_llama(register_block_sparse(), **settings)
    with pytest.raises(ModelError, match=said):
        model(input_ids=torch.ones(1, 6, dtype=torch.int64), **inputs)


def test_a_cache_of_earlier_keys_is_refused():
    model = tiny_llama(register_block_sparse()).eval()
    begun = model(input_ids=torch.ones(1, 6, dtype=torch.int64), use_cache=True)
    with pytest.raises(ModelError, match="a cache of earlier keys"):
        model(input_ids=torch.ones(1, 1, dtype=torch.int64), past_key_values=begun.past_key_values)


def by_heads(length: int, heads: tuple[int, int]) -> list[Tensor]:
    return [each.transpose(1, 2) for each in tensors(length, heads)]


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [1, 16, 37, 64])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)])
def test_branches_are_one_softmax_over_the_keys_that_they_meet(branches, is_causal, length, heads):
    q, k, v = by_heads(length, heads)
    ours, log_sums = dilated_attention(
        q,
        k,
        v,
        segment_lengths=branches[0],
        dilation_rates=branches[1],
        scaling=0.3,
        is_causal=is_causal,
    )
    count = meetings(length, heads[0], branches)
    count = count if is_causal else count.tril(-1).mT + count
    expected, sums = dense(q, k, v, count, 0.3)
    wanted = with_gradients([expected], (q, k, v))
    assert_near(with_gradients([ours], (q, k, v)), wanted, TOLERANCE, beside=1)
    finite = sums > -torch.inf
    assert (log_sums[finite] - sums[finite]).abs().max() < TOLERANCE
    assert (log_sums[~finite] == -torch.inf).all()


def test_the_published_branches_are_the_default():
    q, k, v = by_heads(50, (4, 4))
    default = dilated_attention(q, k, v, scaling=0.3)[0]
    named = dilated_attention(
        q, k, v, segment_lengths=(25, 50), dilation_rates=(1, 2), scaling=0.3
    )[0]
    assert torch.equal(default, named)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"segment_lengths": (8, 16), "dilation_rates": (1,)}, "2 segment lengths and 1"),
        ({"segment_lengths": (), "dilation_rates": ()}, "0 segment lengths"),
        ({"segment_lengths": (0,), "dilation_rates": (1,)}, "segment lengths"),
        (
            {"segment_lengths": (9,), "dilation_rates": (1,), "normalisation": "groups"},
            "do not divide 16",
        ),
    ],
)
def test_branches_that_cannot_be_are_refused(settings, said):
    q, k, v = by_heads(16, (2, 2))
    with pytest.raises(UsageError, match=said):
        dilated_attention(q, k, v, scaling=1.0, **settings)


class LowerTriangularMask:
    """As xformers has it: a query sees the keys up to its own."""


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: object = None, op: object = None
) -> Tensor:
    """Textbook attention, of (batch, length, heads, head_dim)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if attn_bias is not None:
        assert isinstance(attn_bias, LowerTriangularMask)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)


@pytest.fixture(scope="module")
def peer() -> type[nn.Module]:
    """The package's class."""
    assert version("dilated-attention-pytorch") == "0.2.0"
    package, operators = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
    operators.AttentionOp = object
    operators.LowerTriangularMask = LowerTriangularMask
    operators.memory_efficient_attention = memory_efficient_attention
    package.ops = operators
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "xformers", package)
        patch.setitem(sys.modules, "xformers.ops", operators)
        return importlib.import_module(
            "dilated_attention_pytorch.dilated_attention"
        ).DilatedAttention


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [3, 4, 5, 7, 12])
@pytest.mark.parametrize(
    "branches",
    [((16,), (2,)), ((32, 64), (1, 2)), ((8, 16, 64), (1, 2, 4)), ((16, 16, 32), (3, 5, 7))],
)
def test_groups_are_those_of_the_package(peer, branches, heads, is_causal):
    torch.manual_seed(heads)
    qkv = [torch.randn(2, 64, heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    ours = DilatedAttention(*branches, normalisation="groups")(*qkv, is_causal=is_causal)
    theirs = peer(branches[0], branches[1])(*qkv, is_causal=is_causal)
    assert_near(with_gradients([ours], qkv), with_gradients([theirs], qkv), TOLERANCE, beside=1)


def test_a_softmax_over_all_branches_is_another_convention(peer):
    """What the two conventions share: one branch without dilation, before it is divided."""
    inputs = [torch.randn(1, 32, 4, 8, dtype=torch.float64) for _ in range(3)]
    softmax = DilatedAttention([16], [1])(*inputs, is_causal=True)
    theirs = peer([16], [1])(*inputs, is_causal=True)
    assert (softmax / softmax.sum(1, keepdim=True) - theirs).norm() <= TOLERANCE * theirs.norm()
    assert (softmax - theirs).norm() > 0.1 * theirs.norm()
