"""A benchmark of attentions: what is asked, what each process measured, and the document that
``highwater bench attention`` answers with.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

from highwater.errors import UsageError
from highwater.spec.codec import Record
from highwater.spec.trial import Device

Direction = Literal["forward", "forward+backward"]
Mode = Literal["single", "data parallel", "ring", "ulysses"]
"""How GPUs are used: one; one sequence each; one sequence that all share."""
BenchResult = Literal["fits", "ran out of memory", "took too long", "red", "crashed"]
"""How a case ended. ``red``: it does not equal the reference, and has no number."""
BenchDtype = Literal["fp16", "bf16", "fp32"]
FusedKernel = Literal["cudnn", "flash", "efficient"]
"""A fused attention of PyTorch's; ``efficient``: for GPUs and dtypes that flash does not know."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
CPU_MOST_TOKENS = 4096
"""Longest length on the CPU, unless another is named."""
MOST_SEARCHED_TOKENS = 1 << 24
"""Longest length on a GPU, unless another is named: 16,777,216."""
PARTS_OF_A_DOUBLING = 8
"""Parts of the last doubling that a longest length is found to, and a predicted one rounded to."""
BATCHES = (2, 4)
"""Sequences of the cases that are measured besides one sequence."""
BATCH_TOKENS = (16_384, 32_768)
"""Lengths at which those are."""


class Implementation(Record, frozen=True, kw_only=True):
    """An attention that takes part."""

    family: str
    """Name that stands for all of its kind."""
    what: str
    changes_model: bool = False
    """Whether a model that attends so is another one than with dense attention."""
    mode: Mode = "single"
    alone: str = ""
    """Of one whose sequences GPUs share: the name of what one GPU alone attends by."""
    code: str = ""
    """How one calls it, in Python."""


_SPARSE = "BlockSparseAttention(SparsePatternConfig({}))(*by_token).transpose(1, 2)"


def _block_sparse(ratio: float | Literal["adaptive"], what: str) -> Implementation:
    share = f"sparsity_ratio={ratio!r}".replace("'", '"')
    return Implementation(
        family="block_sparse",
        what=f"block-sparse, {what}",
        changes_model=True,
        code=_SPARSE.format(share),
    )


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "reference": Implementation(
        family="reference", what="the textbook formula in float64, short lengths alone"
    ),
    "dense": Implementation(
        family="dense",
        what="PyTorch's fused attention: cuDNN, flash, or else memory-efficient",
        code="scaled_dot_product_attention(q, k, v, is_causal=True)",
    ),
    "dense_flex": Implementation(
        family="dense_flex",
        what="PyTorch's FlexAttention with a causal block mask",
        code="flex_attention(q, k, v, block_mask=causal_mask)",
    ),
    "window": Implementation(
        family="window",
        what="a window of 4,096 tokens, on the CPU of 512",
        changes_model=True,
        code=_SPARSE.format('pattern_type="local_window", local_window_size=4096'),
    ),
    "block_sparse_5": _block_sparse(0.05, "5 % of the key blocks"),
    "block_sparse_2": _block_sparse(0.02, "2 % of the key blocks"),
    "block_sparse_1": _block_sparse(0.01, "1 % of the key blocks"),
    "block_sparse_adaptive": _block_sparse("adaptive", "5 % to 65,536, 2 % to 131,072, then 1 %"),
    "dilated": Implementation(
        family="dilated",
        what="dilated: segments of half the length and of all of it, with rates 1 and 2",
        changes_model=True,
        code="attention(*by_token, is_causal=True).transpose(1, 2)",
    ),
    "ring": Implementation(
        family="ring",
        what="dense, keys and values passing from GPU to GPU",
        mode="ring",
        alone="dense",
        code="attend_in_ring(q, k, v, ring=ring)",
    ),
    "block_sparse_ring": Implementation(
        family="block_sparse_ring",
        what="block_sparse_adaptive, each GPU sent the keys and values that its queries keep",
        changes_model=True,
        mode="ring",
        alone="block_sparse_adaptive",
        code='BlockSparseAttention(SparsePatternConfig(sparsity_ratio="adaptive"), group=group, '
        'shares="zigzag")(*by_token).transpose(1, 2)',
    ),
    "ulysses": Implementation(
        family="ulysses",
        what="dense, each GPU with a share of the heads",
        mode="ulysses",
        alone="dense",
        code="attend_sharded(q, k, v, group=group, attend=attend)",
    ),
}
"""Everything that can take part, in the order of the report; ``bench/attention/contenders`` has how
each is made.
"""


def implementations_named(words: Sequence[str]) -> tuple[str, ...]:
    """The implementations that are meant, in their order: all where none is named, and all of a
    family by its name.

    Raises UsageError for a name that there is not, with the nearest.
    """
    names = dict.fromkeys((*IMPLEMENTATIONS, *(each.family for each in IMPLEMENTATIONS.values())))
    for word in words:
        if word not in names:
            near = get_close_matches(word, names, n=1, cutoff=0.4)
            raise UsageError(
                f"there is no implementation {word!r}; there are {', '.join(IMPLEMENTATIONS)}",
                hint=f"use `--implementations {near[0] if near else 'dense'}`",
            )
    return tuple(
        name
        for name, each in IMPLEMENTATIONS.items()
        if not words or name in words or each.family in words
    )


class BenchOrder(Record, frozen=True, kw_only=True):
    """What is asked of the processes that measure."""

    device: Device
    implementations: tuple[str, ...]
    directions: tuple[Direction, ...] = DIRECTIONS
    gpus: int = 1
    """GPUs, or on the CPU processes that stand for one each."""
    memory_bytes: int | None = None
    """Memory of each, the runtime's own included; None: all that a GPU has."""
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    dtype: BenchDtype = "fp32"
    same_qkv: bool = False
    """Whether queries, keys and values are one tensor, as in the published benchmark."""
    lengths: tuple[int, ...] = ()
    """Lengths to measure, in tokens; empty: doubling, then bisection."""
    most_tokens: int = CPU_MOST_TOKENS
    """Longest length of a search."""
    timeout_s: float = 10.0
    """Longest time of one pass."""
    threads: int = 1
    """On the CPU: threads of each process."""


class BenchMachine(Record, frozen=True, kw_only=True):
    """What was measured on."""

    device_name: str
    memory_total_bytes: int
    """Of one GPU as its driver reports it, or of the host."""
    outside_bytes: int
    """Memory that a process takes before any tensor: the context, or on the CPU the runtime."""
    versions: dict[str, str]
    kernel: FusedKernel | None = None
    """Fused kernel that dense attention runs on; None where none does."""


class BenchCheck(Record, frozen=True, kw_only=True):
    """An implementation beside the reference, before anything is measured of it."""

    implementation: str
    mode: Mode
    length_tokens: int
    differences: dict[str, float | None]
    """Norm-relative difference of the output and of each gradient, the largest of all ranks; None
    where that is no number."""
    tolerance: float
    reason: str = ""
    """Why it is red; empty where it is not."""


class BenchRow(Record, frozen=True, kw_only=True):
    """One case: an implementation, a mode, a direction, a length and a batch."""

    implementation: str
    mode: Mode
    direction: Direction
    length_tokens: int | None
    """Tokens of one sequence, on all GPUs together; None where it is red."""
    batch: int = 1
    """Sequences, on all GPUs together."""
    gpus: int = 1
    result: BenchResult
    reason: str = ""
    time_s: float | None = None
    """Median of the timed passes, of the slowest GPU."""
    passes: int = 0
    kept_share: float | None = None
    """Share of the causal pairs of tokens that are computed, measured by element; of ``dilated`` a
    pair that two branches meet counts twice."""
    after_qkv_bytes: tuple[int, ...] = ()
    """Allocated once queries, keys and values are there; of each GPU, as all that follow."""
    kept_for_backward_bytes: tuple[int, ...] = ()
    """Allocated more than that between the forward and the backward pass."""
    peak_allocated_bytes: tuple[int, ...] = ()
    peak_reserved_bytes: tuple[int, ...] = ()
    """On the CPU: the data segment of the process, which the limit bounds, runtime included."""

    @property
    def fits(self) -> bool:
        """Whether it ran to its end."""
        return self.result == "fits"


class NotRun(Record, frozen=True, kw_only=True):
    """An implementation and mode that was asked for and does not run here."""

    implementation: str
    mode: Mode
    reason: str


class BenchTrying(Record, frozen=True, kw_only=True):
    """A case that begins."""

    implementation: str
    mode: Mode
    direction: Direction
    length_tokens: int
    batch: int


class BenchRefusal(Record, frozen=True, kw_only=True):
    """Why nothing can be measured."""

    problem: str
    hint: str


class BenchLine(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of what the processes tell: one of these."""

    machine: BenchMachine | None = None
    check: BenchCheck | None = None
    trying: BenchTrying | None = None
    row: BenchRow | None = None
    not_run: NotRun | None = None
    refusal: BenchRefusal | None = None


class AttentionBench(Record, frozen=True, kw_only=True):
    """All that was measured."""

    made_at: str
    """Date and time, ISO 8601."""
    command: tuple[str, ...]
    order: BenchOrder
    machine: BenchMachine
    checks: tuple[BenchCheck, ...]
    rows: tuple[BenchRow, ...]
    not_run: tuple[NotRun, ...] = ()
    is_whole: bool = True
    """Whether it ended by itself; not after Ctrl-C."""
