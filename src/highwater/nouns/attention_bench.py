"""Records of an attention benchmark: the order, what each process measured, and the result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from highwater.errors import UsageError
from highwater.nouns.codec import Record, packaged
from highwater.nouns.declaration import nearest
from highwater.nouns.layout import Device
from highwater.nouns.sparse_pattern import SparsePatternConfig

Direction = Literal["forward", "forward+backward"]
Mode = Literal["single", "data parallel", "ring", "ulysses"]
"""How GPUs are used: one alone, each with a sequence of its own, or all on one sequence."""
BenchResult = Literal["fits", "ran out of memory", "took too long", "red", "crashed"]
"""Results of a case. ``red``: it differs from the reference, and has no number."""
BenchDtype = Literal["fp16", "bf16", "fp32"]
FusedKernel = Literal["cudnn", "flash", "efficient"]
"""A fused attention of PyTorch; ``efficient``: for GPUs and dtypes that flash does not know."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
START_TOKENS: Mapping[Device, int] = {"cpu": 512, "cuda": 4096}
"""First length of a search by doubling, in tokens."""
LEAST_TOKENS = 128
"""Shortest length that is tried, in tokens."""
MOST_TOKENS: Mapping[Device, int] = {"cpu": 4096, "cuda": 1 << 24}
"""Longest length of a search unless another is named, on GPUs 16,777,216 tokens."""
PARTS_OF_A_DOUBLING = 8
"""Parts of the last doubling: a longest length is found, and a predicted one rounded, to one."""
REFERENCE_TOKENS: Mapping[Device, int] = {"cpu": 1024, "cuda": 8192}
"""Longest length at which the reference, the textbook formula, is measured, in tokens."""
CHECKED_TOKENS = 515
"""Length of the sequence of a check: five blocks, the last of them not full."""
COMPARED = ("output", "query_gradient", "key_gradient", "value_gradient")
"""Tensors that a check compares with the reference's."""
OFF_AT_THE_MOST: Mapping[BenchDtype, float] = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 2e-5}
"""Largest norm-relative difference of output and gradients, by dtype: eight of its roundings."""


class Implementation(Record, frozen=True, kw_only=True):
    """One attention that ``bench attention`` measures: its pattern, and how it uses GPUs."""

    what: str
    modes: tuple[Mode, ...] = ("single",)
    """Its uses of GPUs; whatever runs on one GPU takes part in DataParallel, too."""
    alone: str = ""
    """If GPUs share its sequences: name of the attention on one GPU that it is compared with."""
    pattern: SparsePatternConfig | None = None
    """The pattern of the keys it keeps, if there is one."""
    takes_pattern: bool = False
    """True if ``--pattern-type`` and its companions replace the pattern."""
    takes_segments: bool = False
    """True if it reads ``--segment-lengths`` and ``--dilation-rates``."""


IMPLEMENTATIONS: Mapping[str, Implementation] = packaged(
    "nouns/catalog/attentions.json", dict[str, Implementation]
)
"""Every attention by its name in the report; ``engine/bench/attention/contenders`` makes it."""
SHARES = ("block_sparse_5", "block_sparse_2", "block_sparse_1", "block_sparse_adaptive")
"""Implementations that ``block_sparse`` stands for where no pattern is typed."""
CLASSES: Mapping[str, str] = {
    "DilatedAttention": "dilated",
    "ImprovedDilatedAttention": "dilated",
    "BlockSparseAttention": "block_sparse",
    "BlockSparseRingDilatedAttention": "block_sparse_ring_dilated",
    "BlockSparseRingDistributedDilatedAttention": "block_sparse_ring_dilated",
    "RingAttention": "ring",
}
"""Published classes, and the implementation or family that computes the same here."""


def implementations_named(words: Sequence[str], *, has_pattern: bool = False) -> tuple[str, ...]:
    """The named implementations, in the catalog's order; all implementations if ``words`` is empty.
    ``block_sparse`` stands for each of ``SHARES`` unless the user gave a pattern (``has_pattern``).
    Raises UsageError for an unknown name, with the most similar known name.
    """
    names = (*IMPLEMENTATIONS, *CLASSES)
    for word in words:
        if word not in names:
            raise UsageError(
                f"there is no implementation {word!r}; there are {', '.join(IMPLEMENTATIONS)}",
                hint=f"use `--implementations {nearest(word, names) or 'dense'}`",
            )
    meant = {CLASSES.get(word, word) for word in words or IMPLEMENTATIONS}
    if not has_pattern and "block_sparse" in meant:
        meant = meant - {"block_sparse"} | set(SHARES)
    elif not words:
        meant -= set(SHARES)
    return tuple(name for name in IMPLEMENTATIONS if name in meant)


class BenchOrder(Record, frozen=True, kw_only=True):
    """The benchmark that ``bench attention`` runs: what it measures, on which GPUs, how long."""

    device: Device
    implementations: tuple[str, ...]
    directions: tuple[Direction, ...] = DIRECTIONS
    gpus: int = 1
    """GPUs; on the CPU processes that stand for one each."""
    memory_bytes: int | None = None
    """Memory of each GPU or process, with its runtime; None: all that a GPU has."""
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    dtype: BenchDtype = "fp32"
    same_qkv: bool = False
    """True if queries, keys and values are one tensor, as in the published benchmark."""
    patterns: dict[str, SparsePatternConfig] = {}  # noqa: RUF012 -- msgspec copies it
    """Patterns in the place of implementations' own, by their names."""
    segment_lengths: tuple[int, ...] = ()
    """Segments of dilated attention, in tokens; empty: half the length and all of it."""
    dilation_rates: tuple[int, ...] = (1, 2)
    """A rate for each segment length: with 2 every second token takes part."""
    lengths: tuple[int, ...] = ()
    """Lengths to measure, in tokens; empty: doubling, then bisection."""
    most_tokens: int = MOST_TOKENS["cpu"]
    """Longest length of a search, in tokens."""
    timeout_s: float = 10.0
    """Longest time of one pass, in seconds."""
    threads: int = 1
    """On the CPU: threads of each process."""

    def next_length(self, tried: Mapping[int, bool], *, most: int) -> int | None:
        """Length to measure after those in ``tried`` (True: it ran); None: all are measured."""
        if self.lengths:
            left = (each for each in self.lengths if each <= most and each not in tried)
            return min(left, default=None)
        fits = max((each for each, does in tried.items() if does), default=None)
        fails = min((each for each, does in tried.items() if not does), default=None)
        if fits is None:
            start = min(START_TOKENS[self.device], most) if fails is None else fails // 2
            return start if fails is None or start >= LEAST_TOKENS else None
        if fails is None:
            return None if fits == most else min(2 * fits, most)
        step = max(1, (1 << (fits.bit_length() - 1)) // PARTS_OF_A_DOUBLING)
        middle = fits + (fails - fits) // (2 * step) * step
        return middle if fits < middle < fails else None

    def entries(self) -> Iterator[tuple[str, Mode]]:
        """Yield each implementation with each of its modes, in the order of measurement."""
        modes = {name: IMPLEMENTATIONS[name].modes for name in self.implementations}
        single = [name for name in modes if "single" in modes[name]]
        for name in single:
            yield name, "single"
        for name in single if self.gpus > 1 else ():
            if name != "reference":
                yield name, "data parallel"
        for name, of in modes.items():
            for mode in of:
                if mode != "single" and (self.gpus > 1 or name not in single):
                    yield name, mode

    def alone(self, name: str) -> str:
        """Name of the attention on one GPU that ``name``, on several, is compared with."""
        own = IMPLEMENTATIONS[name].alone or name
        return "block_sparse" if name in self.patterns and own != name else own


class BenchMachine(Record, frozen=True, kw_only=True):
    """The machine that a benchmark ran on: its device, memory and package versions."""

    device_name: str
    memory_total_bytes: int
    """Memory of one GPU as its driver reports it, or of the host."""
    outside_bytes: int
    """Memory of a process before any tensor: its context, or on the CPU its runtime."""
    versions: dict[str, str]
    kernel: FusedKernel | None = None
    """Fused kernel that dense attention runs on; None where none does."""


class BenchCheck(Record, frozen=True, kw_only=True):
    """Comparison of an implementation with the reference, before it is measured."""

    implementation: str
    mode: Mode
    length_tokens: int
    differences: dict[str, float | None]
    """Norm-relative differences of output and gradients, the largest of all ranks; None: NaN."""
    tolerance: float
    reason: str = ""
    """Why it is red; empty: it equals the reference."""


class Entry(Record, frozen=True):
    """An implementation, a mode and a direction: what one line of the report is about."""

    implementation: str
    mode: Mode
    direction: Direction

    @property
    def entry(self) -> "Entry":
        """The entry alone, of a record that says more about it."""
        return Entry(self.implementation, self.mode, self.direction)


class BenchRow(Entry, frozen=True, kw_only=True):
    """One case: an implementation, a mode, a direction, a length and a batch."""

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
    """Share of the causal pairs of tokens that are computed, counted by element; in dilated
    segments a pair that two branches have counts twice."""
    after_qkv_bytes: tuple[int, ...] = ()
    """Bytes allocated with queries, keys and values alone, for each GPU; so are the next two."""
    peak_allocated_bytes: tuple[int, ...] = ()
    peak_reserved_bytes: tuple[int, ...] = ()
    """On the CPU: the data segment of the process, which the limit bounds, runtime included."""

    @property
    def fits(self) -> bool:
        """True if the case ran to its end."""
        return self.result == "fits"


class NotRun(Record, frozen=True, kw_only=True):
    """An implementation and mode that was requested but cannot run on this machine."""

    implementation: str
    mode: Mode
    reason: str


class BenchLine(Record, frozen=True, kw_only=True):
    """One result of the benchmark as it comes: exactly one field is set, the others are None."""

    machine: BenchMachine | None = None
    check: BenchCheck | None = None
    row: BenchRow | None = None
    not_run: NotRun | None = None


class BenchShare(Record, frozen=True, kw_only=True):
    """The work of one group of processes: check one implementation and mode, measure its cases."""

    order: BenchOrder
    implementation: str = "dense"
    mode: Mode = "single"
    machine: BenchMachine | None = None
    """None: the process describes the machine, and measures nothing."""
    is_checked: bool = False
    """True if no check is needed before the first case."""
    rows: tuple[BenchRow, ...] = ()
    """The cases that are done."""

    @property
    def gpus(self) -> int:
        """Number of GPUs, which share each sequence, or in data parallel mode the batch."""
        return 1 if self.mode == "single" else self.order.gpus

    @property
    def processes(self) -> int:
        """Number of processes: one for each GPU, or one for all if threads share them."""
        in_threads = self.mode == "data parallel" and self.order.device == "cuda"
        return 1 if in_threads else self.gpus

    def case(self, direction: Direction) -> BenchRow:
        """A direction's case, still without a length; DataParallel has a sequence for each GPU."""
        return BenchRow(
            self.implementation,
            self.mode,
            direction,
            length_tokens=None,
            batch=self.gpus if self.mode == "data parallel" else 1,
            gpus=self.gpus,
            result="fits",
        )

    def next_case(self) -> BenchRow | None:
        """The next case to measure, after those in ``rows``; None if all are measured."""
        most = self.order.most_tokens
        if self.implementation == "reference":
            most = min(most, REFERENCE_TOKENS[self.order.device])
        for direction in self.order.directions:
            done = [row for row in self.rows if row.direction == direction]
            tried = {row.length_tokens or 0: row.fits for row in done}
            if (length := self.order.next_length(tried, most=most)) is not None:
                return self.case(direction).replace(length_tokens=length)
        return None


class BenchPart(Record, frozen=True, kw_only=True):
    """Report of one process on one case: its result, or the reason why it has none."""

    result: BenchResult = "fits"
    """Anything else: the process failed, and has nothing but the reason."""
    reason: str = ""
    hint: str = ""
    machine: BenchMachine | None = None
    not_run: tuple[NotRun, ...] = ()
    """Implementations that do not run on the machine; told together with it."""
    differences: dict[str, float | None] = {}  # noqa: RUF012 -- msgspec copies it
    """Norm-relative differences from the reference; None where one is no number."""
    row: BenchRow | None = None


class AttentionBench(Record, frozen=True, kw_only=True):
    """A benchmark's result: its order, the machine, and all checks and measurements."""

    made_at: str
    """Date and time, ISO 8601."""
    command: tuple[str, ...]
    order: BenchOrder
    machine: BenchMachine
    checks: tuple[BenchCheck, ...]
    rows: tuple[BenchRow, ...]
    not_run: tuple[NotRun, ...] = ()
    is_whole: bool = True
    """False after Ctrl-C: cases may be missing."""
