"""A benchmark of attentions: what is asked, what each process measured, and the document that
``highwater bench attention`` answers with.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.sparse_pattern import SparsePatternConfig
from highwater.nouns.trial import Device

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
    has_ring: bool = False
    """Whether GPUs share a sequence of it by a ring too, besides what one does alone."""
    alone: str = ""
    """Of one whose sequences GPUs share: the name of what one GPU alone attends by."""
    pattern: SparsePatternConfig | None = None
    """What it keeps, where a pattern says that."""
    takes_pattern: bool = False
    """Whether ``--pattern-type`` and the flags with it name another one."""
    takes_segments: bool = False
    """Whether ``--segment-lengths`` and ``--dilation-rates`` are about it."""
    code: str = ""
    """How one calls it, in Python; ``{pattern}`` and ``{branches}`` stand for those of an order."""


_SPARSE = "BlockSparseAttention({pattern})(*by_token).transpose(1, 2)"
_ADAPTIVE = SparsePatternConfig(sparsity_ratio="adaptive")


def _block_sparse(
    what: str, pattern: SparsePatternConfig, *, takes_pattern: bool = False
) -> Implementation:
    return Implementation(
        family="block_sparse",
        what=f"block-sparse, {what}",
        changes_model=True,
        pattern=pattern,
        takes_pattern=takes_pattern,
        code=_SPARSE,
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
        pattern=SparsePatternConfig(pattern_type="local_window", local_window_size=4096),
        code=_SPARSE,
    ),
    "block_sparse": _block_sparse(
        "by the pattern of your flags", SparsePatternConfig(), takes_pattern=True
    ),
    "block_sparse_5": _block_sparse(
        "5 % of the key blocks", SparsePatternConfig(sparsity_ratio=0.05)
    ),
    "block_sparse_2": _block_sparse(
        "2 % of the key blocks", SparsePatternConfig(sparsity_ratio=0.02)
    ),
    "block_sparse_1": _block_sparse(
        "1 % of the key blocks", SparsePatternConfig(sparsity_ratio=0.01)
    ),
    "block_sparse_adaptive": _block_sparse(
        "5 % to 65,536, 2 % to 131,072, then 1 %", pattern=_ADAPTIVE
    ),
    "dilated": Implementation(
        family="dilated",
        what="dilated: segments of half the length and of all of it, with rates 1 and 2",
        changes_model=True,
        takes_segments=True,
        code="DilatedAttention({branches})(*by_token, is_causal=True).transpose(1, 2)",
    ),
    "block_sparse_ring_dilated": Implementation(
        family="block_sparse_ring_dilated",
        what="the segments of dilated, in each of which a pattern keeps blocks of 256: adaptive",
        changes_model=True,
        has_ring=True,
        pattern=SparsePatternConfig(sparsity_ratio="adaptive", block_size=256),
        takes_pattern=True,
        takes_segments=True,
        code="BlockSparseRingDilatedAttention({branches}, {pattern})(*by_token).transpose(1, 2)",
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
        what="block-sparse, adaptive: each GPU is sent the keys and values that its queries keep",
        changes_model=True,
        mode="ring",
        alone="block_sparse_adaptive",
        pattern=_ADAPTIVE,
        takes_pattern=True,
        code='BlockSparseAttention({pattern}, group=group, shares="zigzag")(*by_token)'
        ".transpose(1, 2)",
    ),
    "ulysses": Implementation(
        family="ulysses",
        what="dense, each GPU with a share of the heads",
        mode="ulysses",
        alone="dense",
        code="attend_sharded(q, k, v, group=group, attend=attend)",
    ),
}
"""Everything that can take part, in the order of the report; ``engine/bench/attention/contenders``
has how each is made. """
CLASSES: Mapping[str, str] = {
    "DilatedAttention": "dilated",
    "ImprovedDilatedAttention": "dilated",
    "BlockSparseAttention": "block_sparse",
    "BlockSparseRingDilatedAttention": "block_sparse_ring_dilated",
    "BlockSparseRingDistributedDilatedAttention": "block_sparse_ring_dilated",
    "RingAttention": "ring",
}
"""Published classes, and the name or family of what computes the same here."""


def implementations_named(words: Sequence[str], *, has_pattern: bool = False) -> tuple[str, ...]:
    """The implementations that are meant, in their order: all where none is named, and all of a
    family by its name; ``has_pattern``: of the block-sparse ones that whose pattern is typed, else
    those that have one of their own.

    Raises UsageError for a name that there is not, with the nearest.
    """
    families = (each.family for each in IMPLEMENTATIONS.values())
    names = dict.fromkeys((*IMPLEMENTATIONS, *families, *CLASSES))
    for word in words:
        if word not in names:
            near = get_close_matches(word, names, n=1, cutoff=0.4)
            raise UsageError(
                f"there is no implementation {word!r}; there are {', '.join(IMPLEMENTATIONS)}",
                hint=f"use `--implementations {near[0] if near else 'dense'}`",
            )
    meant = {CLASSES.get(word, word) for word in words}

    def is_meant(name: str, each: Implementation) -> bool:
        if each.family == "block_sparse" and each.takes_pattern != has_pattern:
            return name in meant and not each.takes_pattern
        return not meant or name in meant or each.family in meant

    return tuple(name for name, each in IMPLEMENTATIONS.items() if is_meant(name, each))


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
    patterns: dict[str, SparsePatternConfig] = {}  # noqa: RUF012 -- msgspec copies it
    """Patterns that implementations have in the place of their own."""
    segment_lengths: tuple[int, ...] = ()
    """Of dilated attention, in tokens; empty: half the length and all of it."""
    dilation_rates: tuple[int, ...] = (1, 2)
    """A rate for each of them."""
    lengths: tuple[int, ...] = ()
    """Lengths to measure, in tokens; empty: doubling, then bisection."""
    most_tokens: int = CPU_MOST_TOKENS
    """Longest length of a search."""
    timeout_s: float = 10.0
    """Longest time of one pass."""
    threads: int = 1
    """On the CPU: threads of each process."""

    def alone(self, name: str) -> str:
        """The name of what one GPU alone attends by, in the place of an implementation."""
        own = IMPLEMENTATIONS[name].alone or name
        return "block_sparse" if name in self.patterns and own != name else own

    def code(self, name: str) -> str:
        """How one calls an implementation, as it was measured."""
        segments = list(self.segment_lengths) or "[length // 2, length]"
        own = IMPLEMENTATIONS[name]
        return own.code.format(
            pattern=self.patterns.get(name, own.pattern),
            branches=f"{segments}, {list(self.dilation_rates)}",
        )


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
    """Share of the causal pairs of tokens that are computed, by element; of dilated segments a pair
    that two branches meet counts twice."""
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
