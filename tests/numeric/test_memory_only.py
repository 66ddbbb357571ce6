"""Memory-only attention allocates what attention over whole documents does."""

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from highwater.engine.attention import dense
from highwater.engine.attention.dense import attend
from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
from highwater.engine.attention.registry import register
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import ModelError
from highwater.nouns import layout as working_sizes
from highwater.nouns.corpus import pieces
from tables import deep

PACKINGS = [(4096,), (4096, 4096), (6000, 6000, 64), (3000, 1, 1, 5000), (1000,), (2049,)]
HEADS = [(4, 4), (4, 2), (6, 1), (1, 1)]
EVERY = [*product(PACKINGS, HEADS, (False, True))]
FEW = {
    (packing, HEADS[(at + by_heads) % len(HEADS)], by_heads)
    for at, packing in enumerate(PACKINGS)
    for by_heads in (False, True)
}
"""Each packing in both layouts, each number of heads in turn: `make test-all` has all."""


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that tensors made under it still hold; ``history`` after every
    operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.history: list[int] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), before)
        self.history.append(self.live)
        return result

    def _count(self, storage: Any, before: set[int]) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._known or key in before or not size:
            return
        self._known.add(key)
        self.live += size
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def step(
    lengths: tuple[int, ...], heads: tuple[int, int], *, in_pieces: bool, by_heads: bool
) -> Callable[[], None]:
    tokens, size = sum(lengths), 16

    def make(count: int) -> Any:
        tensor = (
            torch.randn(1, count, tokens, size)
            if by_heads
            else torch.randn(1, tokens, count, size).transpose(1, 2)
        )
        return tensor.requires_grad_()

    q, k, v = make(heads[0]), make(heads[1]), make(heads[1])
    upstream = torch.randn(1, tokens, heads[0], size)

    def run() -> None:
        attend(
            q, k, v, document_lengths=lengths, scaling=0.25, kernel="flash", in_pieces=in_pieces
        ).backward(upstream)

    return run


def allocations(run: Callable[[], None]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return [
        size
        for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    ]


def live_bytes(run: Callable[[], None]) -> list[int]:
    with LiveBytes() as mode:
        run()
    return mode.history


@pytest.mark.parametrize(
    ("lengths", "heads", "by_heads"), [case for case in EVERY if case in FEW or deep(case)]
)
def test_every_allocation_is_that_of_whole_documents(lengths, heads, by_heads):
    whole, cut = (
        allocations(step(lengths, heads, in_pieces=flag, by_heads=by_heads))
        for flag in (False, True)
    )
    assert sum(size > 0 for size in whole) >= 6, (
        "output, log-sum-exp, scratch and three gradients at least"
    )
    assert cut == whole


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("scores", [1, 2**14, 2**23])
@pytest.mark.parametrize("lengths", [(301,), (300, 300), (200, 150)])
def test_capped_scores_take_the_most_in_rows_of_trials(lengths, scores, window, monkeypatch):
    """So does the tracer, whose steps compute no others."""
    monkeypatch.setattr(working_sizes, "SCORES_AT_HAND", scores)
    whole, few = (live_bytes(capped_step(lengths, window, in_pieces=cut)) for cut in (False, True))
    assert max(whole) == max(few)
    assert whole[-1] == few[-1]
    is_in_one = scores == 2**23
    assert (len(whole) == len(few)) == is_in_one


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [(350, 250), (50, 550), (400, 50, 30, 40, 80)])
def test_packed_documents_of_capped_scores_take_no_more_than_one(lengths, window, monkeypatch):
    """Within 2 %: rows at hand are a whole number, and few of such small sizes."""
    monkeypatch.setattr(working_sizes, "SCORES_AT_HAND", 2**14)
    packed, one = (
        live_bytes(capped_step(each, window, in_pieces=False)) for each in (lengths, (600,))
    )
    assert max(packed) <= 1.02 * max(one)


def capped_step(
    lengths: tuple[int, ...], window: int | None, *, in_pieces: bool
) -> Callable[[], None]:
    q, k, v = (
        torch.randn(1, sum(lengths), heads, 8, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (4, 2, 2)
    )
    pattern = Pattern(scaling=0.3, window_tokens=window, soft_cap=5.0)
    documents = Documents(lengths=lengths, pattern=pattern, kernel="flash", in_pieces=in_pieces)

    def run() -> None:
        output, _ = attend_in_pattern(q, k, v, documents=documents)
        output.float().square().sum().backward()
        assert output.isfinite().all()
        assert all(each.grad.isfinite().all() for each in (q, k, v))

    return run


def test_pieces_are_really_short(monkeypatch):
    lengths: list[int] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(q.shape[2])
        return kernel(q, *args, **kwargs)

    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", spy)
    step((8192,), (4, 2), in_pieces=True, by_heads=False)()
    step((8192,), (4, 2), in_pieces=False, by_heads=False)()
    assert lengths[0] < 1536
    assert lengths[1] == 8192


@pytest.mark.parametrize("depth", [1, 2])
def test_only_the_last_layers_attend_over_whole_documents(depth):
    from transformers import Qwen3Config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    interface = ALL_ATTENTION_FUNCTIONS[register("flash", depth=depth).name]
    layer = torch.nn.Identity()
    layer.config = Qwen3Config(num_hidden_layers=3)
    tokens = 4096
    assert (pieces(tokens, "cpu") or 0) > 1
    q = torch.randn(1, 2, tokens, 8)
    arguments = {
        "attention_mask": None,
        "sequence_layout": SequenceLayout((tokens,)),
        "scaling": 0.3,
    }
    whole = attend(q, q, q, document_lengths=(tokens,), scaling=0.3, kernel="flash")
    for index in range(3):
        layer.layer_idx = index
        out, _ = interface(layer, q, q, q, **arguments)
        assert torch.equal(out, whole) == (index >= 3 - depth)
        assert out.isfinite().all()


def test_a_module_that_does_not_know_its_layer_is_refused():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    interface = ALL_ATTENTION_FUNCTIONS[register("flash", depth=1).name]
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises(ModelError, match="does not know its layer"):
        interface(
            torch.nn.Identity(), q, q, q, attention_mask=None, sequence_layout=SequenceLayout((4,))
        )
