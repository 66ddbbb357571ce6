"""FlexAttention from our own tables: its masks keep what the tables keep."""

import _thread
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from closeness import assert_near, with_gradients
from combinatorial import in_pairs
from highwater.engine.activations.host import Kept
from highwater.engine.attention import block_flex, branch_kernel, flex_tiles
from highwater.engine.attention import block_flex as flex
from highwater.engine.attention import branch_attention as branch_attention_module
from highwater.engine.attention.block_attention import kept_in_recompute
from highwater.engine.attention.block_gather import attend_by_gather
from highwater.engine.attention.block_table import BlockTable, TilePairs, block_tables
from highwater.engine.attention.branch_attention import Sharing, branch_attention
from highwater.engine.attention.branch_kernel import attend_branches, branches_obstacle
from highwater.engine.attention.branches import Branch, dilated_branches, exchange
from highwater.engine.attention.flex_tiles import tile_mask
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns.sparse_pattern import PatternType, SparsePatternConfig
from tables import deep

CPU = torch.device("cpu")
BLOCK = 32
"""Of the kernel for the CPU."""
EVERY: tuple[PatternType, ...] = (
    *("dilated_sparse", "strided", "random"),
    *("local_window", "global_local"),
)


def tables_of(pattern_type: PatternType, length: int, block: int = BLOCK) -> tuple[BlockTable, ...]:
    pattern = SparsePatternConfig(
        pattern_type=pattern_type,
        sparsity_ratio=None if "local" in pattern_type else 0.3,
        block_size=block,
        local_window_size=150,
        global_tokens=45,
    )
    return block_tables(pattern, length, CPU)


def widened(mask: BlockMask, keys: int) -> BlockMask:
    """The same with a place for every block of keys in each row, as the CPU's kernel asks."""
    wide = {
        name: torch.nn.functional.pad(table, (0, max(0, -(-keys // BLOCK) - table.shape[-1])))
        for name in ("kv_indices", "full_kv_indices")
        if (table := getattr(mask, name)) is not None
    }
    others = {
        name: getattr(mask, name)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "seq_lengths", "BLOCK_SIZE", "mask_mod")
    }
    unused = dict.fromkeys(("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"))
    return BlockMask(**others, **wide, **unused)


def entries(numbers: Tensor, indices: Tensor) -> set[tuple[int, int]]:
    return {
        (line, int(index))
        for line, count in enumerate(numbers[0, 0].tolist())
        for index in indices[0, 0, line, :count]
    }


@pytest.mark.parametrize("pattern_type", EVERY)
@pytest.mark.parametrize("length", [1, 40, 1000, 2113])
def test_masks_keep_what_the_tables_keep(pattern_type, length):
    for table in tables_of(pattern_type, length):
        mask = flex.block_mask(table)
        part = entries(mask.kv_num_blocks, mask.kv_indices)
        full = entries(mask.full_kv_num_blocks, mask.full_kv_indices)
        assert not part & full
        for forward, numbers, indices in (
            (part, mask.q_num_blocks, mask.q_indices),
            (full, mask.full_q_num_blocks, mask.full_q_indices),
        ):
            assert {(row, column) for column, row in entries(numbers, indices)} == forward
        for row, column in full:
            query = torch.arange(row * BLOCK, row * BLOCK + BLOCK)[:, None]
            key = torch.arange(column * BLOCK, column * BLOCK + BLOCK)
            zero = torch.zeros((), dtype=torch.int64)
            assert mask.mask_mod(zero, zero, query, key).all(), "nothing of it is masked"
        kept = set(zip(table.row_of_entry.tolist(), table.columns[0].tolist(), strict=True))
        assert part | full == kept
        # kernels of PyTorch before 2.12 know one distance between lines of both
        assert mask.kv_indices.stride(-2) == mask.full_kv_indices.stride(-2)
        assert mask.q_indices.stride(-2) == mask.full_q_indices.stride(-2)


@pytest.mark.parametrize("pattern_type", ["dilated_sparse", "strided", "random"])
def test_masks_are_a_small_part_of_what_is_attended(pattern_type):
    """The format's rows are of one width, so that they take more than what is kept; of all pairs of
    blocks they have a small part, and of queries, keys, values and outputs less than a hundredth.
    """
    length = 2**20
    pattern = SparsePatternConfig(
        pattern_type=pattern_type, sparsity_ratio="adaptive", block_size=256
    )
    (table,) = block_tables(pattern, length, CPU)
    taken = sum(each.nbytes for each in flex.block_mask(table).as_tuple() if torch.is_tensor(each))
    assert taken < 16 * 4 * table.columns.shape[1]
    assert taken < table.rows**2 * 4 / 12
    assert taken < 0.01 * length * 4 * 2 * 32 * 2, "two heads of 32, in 16 bits"


@pytest.mark.parametrize(
    ("pattern_type", "groups"),
    [("global_local", 3), *deep(("dilated_sparse", 1), *((other, 2) for other in EVERY[1:4]))],
)
def test_the_kernel_attends_to_what_block_gather_does(pattern_type, groups):
    length = 531
    torch.manual_seed(0)
    query = torch.randn(2, groups, length, 16)
    key, value = (torch.randn(2, length, 16) for _ in range(2))
    for table in tables_of(pattern_type, length):
        expected, _ = attend_by_gather(query, key, value, table, 0.3)
        found = flex.attend_mask(query, key, value, widened(flex.block_mask(table), length), 0.3)
        assert (found - expected).norm() < 8 * torch.finfo(torch.float32).eps * expected.norm()


def test_nothing_is_compiled_on_the_cpu_in_threads_or_for_content():
    query = torch.zeros(1, 4, 256, 16)
    pattern = SparsePatternConfig(block_size=128)
    assert flex.attend_table_of("auto", pattern, query, 2) is attend_by_gather
    found: list[object] = []
    thread = threading.Thread(
        target=lambda: found.append(flex.attend_table_of("auto", pattern, query, 2))
    )
    thread.start()
    thread.join()
    assert found == [attend_by_gather]


def test_threads_of_pytorchs_own_compile_and_those_that_python_started_do_not():
    """A backward pass on a GPU runs in one of the former, and recomputes layers there."""
    found: dict[str, bool] = {}
    done = threading.Event()

    def ask(name: str) -> None:
        found[name] = flex.may_compile()
        done.set()

    thread = threading.Thread(target=ask, args=("Python's",))
    thread.start()
    thread.join()
    done.clear()
    _thread.start_new_thread(ask, ("another's",))  # Python's threading does not know it
    assert done.wait(60)
    ask("first")
    assert found == {"Python's": False, "another's": True, "first": True}


def test_replicas_of_data_parallel_gather_in_every_pass():
    module = torch.nn.Module()
    assert flex.kernel_of(module, "auto") == "auto"
    module._is_replica = True  # as torch.nn.parallel.replicate marks it
    assert [flex.kernel_of(module, each) for each in ("auto", "gather", "flex")] == [
        "gather",
        "gather",
        "flex",
    ]


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    """Block-gather in its place proves itself; with other values it does not."""
    pattern = SparsePatternConfig(pattern_type="strided", block_size=16)
    where = (2, 8, torch.float32, CPU)
    monkeypatch.setattr(block_flex, "attend_by_flex", attend_by_gather)
    block_flex.obstacle.cache_clear()
    with torch.no_grad():
        assert block_flex.obstacle(pattern, *where) is None
    block_flex.obstacle.cache_clear()
    with torch.inference_mode():
        assert block_flex.obstacle(pattern, *where) is None
    monkeypatch.setattr(
        block_flex,
        "attend_by_flex",
        lambda query, key, value, *others: attend_by_gather(query, key, value * 1.001, *others),
    )
    block_flex.obstacle.cache_clear()
    assert "is off by" in (block_flex.obstacle(pattern, *where) or "")

    def fails(*tensors: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(block_flex, "attend_by_flex", fails)
    block_flex.obstacle.cache_clear()
    assert "no such kernel" in (block_flex.obstacle(pattern, *where) or "")
    block_flex.obstacle.cache_clear()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_proof_within_a_recomputed_layer_leaves_no_trace(monkeypatch, keeps):
    pattern = SparsePatternConfig(pattern_type="strided", block_size=16)
    monkeypatch.setattr(block_flex, "attend_by_flex", attend_by_gather)
    block_flex.obstacle.cache_clear()
    found: list[str | None] = []

    def layer(x: Tensor) -> Tensor:
        found.append(block_flex.obstacle(pattern, 2, 8, torch.float32, CPU))
        return torch.nn.functional.silu(x * x)

    x = torch.randn(4, requires_grad=True)
    contexts = {"context_fn": lambda: kept_in_recompute(Kept())} if keeps else {}
    checkpoint(layer, x, use_reentrant=False, **contexts).sum().backward()
    assert found == [None, None]
    recomputed, x.grad = x.grad, None
    layer(x).sum().backward()
    assert torch.equal(recomputed, x.grad)
    block_flex.obstacle.cache_clear()


"""Of the kernel for the CPU."""
LENGTHS = (209, 40, 423)
TILED: tuple[PatternType | None, ...] = (
    *("dilated_sparse", "strided", "random"),
    *("local_window", "global_local"),
    None,
)


def pattern_of(pattern_type: PatternType | None) -> SparsePatternConfig | None:
    return pattern_type and SparsePatternConfig(
        pattern_type=pattern_type,
        sparsity_ratio=None if "local" in pattern_type else 0.4,
        block_size=BLOCK,
        local_window_size=70,
        global_tokens=45,
    )


def seen_in(mask: BlockMask) -> Tensor:
    queries, keys = (torch.arange(length) for length in mask.seq_lengths)
    zero = torch.zeros((), dtype=torch.int64)
    by_token = mask.mask_mod(zero, zero, queries[:, None], keys)
    size = mask.BLOCK_SIZE[0]
    part, full = (
        torch.zeros(len(queries) // size, len(keys) // size, dtype=torch.bool) for _ in range(2)
    )
    for kept, numbers, indices in (
        (part, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert indices is not None
        for row, count in enumerate(numbers[0, 0].tolist()):
            kept[row, indices[0, 0, row, :count].long()] = True
    assert not (part & full).any()
    part, full = (
        each.repeat_interleave(size, 0).repeat_interleave(size, 1) for each in (part, full)
    )
    return full | (part & by_token)


def seen_of(pairs: TilePairs) -> Tensor:
    """The same, token by token, from what the tiles are said to hold."""
    queries, keys, size = pairs.queries, pairs.keys, pairs.queries.size
    seen = torch.zeros(len(queries) * size, len(keys) * size, dtype=torch.bool)
    for row in range(len(queries)):
        for column in pairs.columns[0, pairs.starts[row] : pairs.starts[row + 1]].tolist():
            within = torch.arange(size)
            token = queries.offsets_R[row] + within[:, None]
            key = keys.offsets_R[column] + within
            found = (within[:, None] < queries.counts_R[row]) & (within < keys.counts_R[column])
            found &= (key <= token) | torch.tensor(not pairs.is_causal)
            found &= key >= pairs.keys_from
            if pairs.keys_below is not None:
                found &= key < pairs.keys_below
            if pairs.window_tokens is not None:
                found &= key > token - pairs.window_tokens
            seen[row * size :][:size, column * size :][:, :size] = found
    return seen


@pytest.mark.parametrize(
    ("pattern_type", "is_causal"), [*((each, True) for each in TILED), (None, False)]
)
@pytest.mark.parametrize("degrees", [(1, 1), (1, 2), (3, 1)])
def test_masks_hold_what_queries_see_of_every_rank(
    pattern_type: PatternType | None, degrees: tuple[int, int], *, is_causal: bool
) -> None:
    layout = SequenceLayout(LENGTHS, *degrees)
    count = 0
    for branch in (Branch(), *dilated_branches((100, 300), (1, 3), 4)[1:3]):
        for source in range(layout.degree):
            found = exchange(
                layout,
                branch,
                pattern_of(pattern_type),
                is_causal=is_causal,
                rank=layout.degree - 1,
                source=source,
                device=CPU,
            )
            for pairs in found.pairs:
                mask = tile_mask(pairs)
                assert torch.equal(seen_in(mask), seen_of(pairs))
                count += int(seen_in(mask).sum())
    assert count


def in_plain_pytorch(
    query_NGSD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    mask: BlockMask,
    scaling: float,
    **_: Any,
) -> Any:
    """What FlexAttention computes, and of a query that sees nothing zeros and minus infinity."""
    seen = seen_in(mask)
    scores = query_NGSD @ key_NSD[:, None].transpose(-1, -2) * scaling
    finite = scores.masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    output = (finite.softmax(-1) * seen) @ value_NSD[:, None]

    class Auxiliary:
        lse = finite.logsumexp(-1).masked_fill(~seen.any(-1), -torch.inf)

    return output, Auxiliary


@pytest.mark.parametrize(
    ("pattern_type", "heads", "is_dilated", "at_hand"),
    in_pairs(TILED, [(4, 2), (3, 3)], [False, True], [1, 2**28]),
)
def test_parts_have_their_part_of_the_gradients(
    pattern_type: PatternType | None,
    heads: tuple[int, int],
    at_hand: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_dilated: bool,
) -> None:
    monkeypatch.setattr(flex_tiles, "attend_mask", in_plain_pytorch)
    monkeypatch.setattr(branch_attention_module, "_QUERIES_AT_HAND", at_hand)
    sharing = Sharing(
        layout=SequenceLayout(LENGTHS),
        branches=dilated_branches((100, 300), (1, 3), 4) if is_dilated else (Branch(),),
        pattern=pattern_of(pattern_type),
        scaling=0.3,
    )
    torch.manual_seed(0)
    shapes = [(2, count, sum(LENGTHS), 8) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found: list[list[Tensor]] = []
    for implementation in ("flex", "gather"):
        output, sums = attend_branches(*inputs, sharing=sharing, implementation=implementation)
        found.append(with_gradients((output, sums.masked_fill(sums == -torch.inf, 0.0)), inputs))
    assert_near(*found, 1e-12)


def test_a_kernel_that_is_wrong_is_not_used_for_branches(monkeypatch):
    """Gathered keys in its place prove themselves; other values do not, and are not used."""
    sharing = Sharing(
        layout=SequenceLayout((64,)),
        branches=(Branch(),),
        pattern=SparsePatternConfig(pattern_type="strided", block_size=16),
        scaling=0.3,
    )
    query, key = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    monkeypatch.setattr(flex_tiles, "attend_mask", in_plain_pytorch)
    branch_kernel.proof_of_branches.cache_clear()
    assert branches_obstacle(sharing, query, 2) is None

    def is_off(query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> Any:
        return in_plain_pytorch(query, key, value * 1.001, *others, **more)

    monkeypatch.setattr(flex_tiles, "attend_mask", is_off)
    branch_kernel.proof_of_branches.cache_clear()
    assert "is off by" in (branches_obstacle(sharing, query, 2) or "")
    monkeypatch.setattr(branch_kernel, "takes", lambda *_: True)
    with pytest.warns(UserWarning, match="keys are gathered instead"):
        output, _ = attend_branches(query, key, key, sharing=sharing)
    branch_kernel.proof_of_branches.cache_clear()
    assert torch.equal(output, branch_attention(query, key, key, sharing=sharing)[0])
