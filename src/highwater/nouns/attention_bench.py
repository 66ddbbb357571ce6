"""A benchmark of attentions: what is asked, what each process measured, and the answer."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

from highwater.errors import UsageError
from highwater.nouns.codec import Record, packaged
from highwater.nouns.layout import Device
from highwater.nouns.sparse_pattern import SparsePatternConfig

Direction = Literal["forward", "forward+backward"]
Mode = Literal["single", "data parallel", "ring", "ulysses"]
"""Uses of GPUs: one; one sequence each; one sequence that all share."""
BenchResult = Literal["fits", "ran out of memory", "took too long", "red", "crashed"]
"""Ends of a case. ``red``: it does not equal the reference, and has no number."""
BenchDtype = Literal["fp16", "bf16", "fp32"]
FusedKernel = Literal["cudnn", "flash", "efficient"]
"""A fused attention of PyTorch's; ``efficient``: for GPUs and dtypes that flash does not know."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
START_TOKENS: Mapping[Device, int] = {"cpu": 512, "cuda": 4096}
"""Length that doubling begins with."""
LEAST_TOKENS = 128
"""Length below which nothing is tried."""
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
REFERENCE_TOKENS: Mapping[Device, int] = {"cpu": 1024, "cuda": 8192}
"""Longest length that is measured with the textbook formula."""
CHECKED_TOKENS = 515
"""Length of the sequence of a check: five blocks, the last of them not full."""
OFF_AT_THE_MOST: Mapping[BenchDtype, float] = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 2e-5}
"""Largest norm-relative difference: eight roundings of the dtype, gradients included."""
PartEnding = Literal["refused", "ran out of memory", "crashed", "took too long", "done"]
"""Ends of a process's part of a case, the worst first: that of several decides for all."""


class Implementation(Record, frozen=True, kw_only=True):
    """An attention that takes part."""

    what: str
    modes: tuple[Mode, ...] = ("single",)
    """Its uses of GPUs; whatever one GPU computes alone takes part in DataParallel too."""
    alone: str = ""
    """If GPUs share its sequences: the name of what one GPU alone attends by."""
    pattern: SparsePatternConfig | None = None
    """The pattern of the keys it keeps, if there is one."""
    takes_pattern: bool = False
    """True if ``--pattern-type`` and the flags with it name another one."""
    takes_segments: bool = False
    """True if ``--segment-lengths`` and ``--dilation-rates`` are about it."""


IMPLEMENTATIONS: Mapping[str, Implementation] = packaged(
    "nouns/catalog/attentions.json", dict[str, Implementation]
)
"""Everything that can take part, as reported; ``engine/bench/attention/contenders`` makes it."""
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
"""Published classes, and the name or family of what computes the same here."""


def implementations_named(words: Sequence[str], *, has_pattern: bool = False) -> tuple[str, ...]:
    """The implementations that are meant, in their order: all where none is named; ``has_pattern``:
    of the block-sparse ones that whose pattern is typed, else ``SHARES``. Raises UsageError for a
    name that there is not, with the nearest.
    """
    names = (*IMPLEMENTATIONS, *CLASSES)
    for word in words:
        if word not in names:
            near = [name for name in names if word and word in name]
            near = near or get_close_matches(word, names, n=1, cutoff=0.4)
            raise UsageError(
                f"there is no implementation {word!r}; there are {', '.join(IMPLEMENTATIONS)}",
                hint=f"use `--implementations {near[0] if near else 'dense'}`",
            )
    meant = {CLASSES.get(word, word) for word in words or IMPLEMENTATIONS}
    if not has_pattern and "block_sparse" in meant:
        meant = meant - {"block_sparse"} | set(SHARES)
    elif not words:
        meant -= set(SHARES)
    return tuple(name for name in IMPLEMENTATIONS if name in meant)


class BenchOrder(Record, frozen=True, kw_only=True):
    """Order for the processes that measure."""

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
    """True if queries, keys and values are one tensor, as in the published benchmark."""
    patterns: dict[str, SparsePatternConfig] = {}  # noqa: RUF012 -- msgspec copies it
    """Patterns that implementations have in the place of their own."""
    segment_lengths: tuple[int, ...] = ()
    """Segments of dilated attention, in tokens; empty: half the length and all of it."""
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

    def next_length(self, tried: Mapping[int, bool], *, most: int) -> int | None:
        """The next length to try after those ``tried``: named ones, or doubling, then bisection."""
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
        """Implementations and modes, in the order in which they are measured."""
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

    def what(self, name: str) -> str:
        """Description of an implementation as measured: its pattern, segments and rates."""
        own = IMPLEMENTATIONS[name]
        words = [own.what]
        if own.takes_pattern:
            words.append(str(self.patterns.get(name, own.pattern)))
        if own.takes_segments:
            segments = list(self.segment_lengths) or "half the length and all of it"
            words.append(f"segments of {segments}, rates {list(self.dilation_rates)}")
        return "; ".join(words)

    def alone(self, name: str) -> str:
        """The name of what one GPU alone attends by, in the place of an implementation."""
        own = IMPLEMENTATIONS[name].alone or name
        return "block_sparse" if name in self.patterns and own != name else own


class BenchMachine(Record, frozen=True, kw_only=True):
    """The machine that was measured on."""

    device_name: str
    memory_total_bytes: int
    """Memory of one GPU as its driver reports it, or of the host."""
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
    """Norm-relative differences of output and gradients, the largest of all ranks; None: NaN."""
    tolerance: float
    reason: str = ""
    """Why it is red; empty where it is not."""


class Entry(NamedTuple):
    """Subject of a line of the report."""

    implementation: str
    mode: Mode
    direction: Direction


class OfEntry(Record, frozen=True, kw_only=True):
    """A figure of one entry."""

    implementation: str
    mode: Mode
    direction: Direction

    @property
    def entry(self) -> Entry:
        """Subject of the figure."""
        return Entry(self.implementation, self.mode, self.direction)


class BenchRow(OfEntry, frozen=True, kw_only=True):
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
    """Share of the causal pairs of tokens that are computed, by element; of dilated segments a pair
    that two branches meet counts twice."""
    after_qkv_bytes: tuple[int, ...] = ()
    """Allocated once queries, keys and values are there; of each GPU, as all that follow."""
    peak_allocated_bytes: tuple[int, ...] = ()
    peak_reserved_bytes: tuple[int, ...] = ()
    """On the CPU: the data segment of the process, which the limit bounds, runtime included."""

    @property
    def fits(self) -> bool:
        """True if it ran to its end."""
        return self.result == "fits"


class NotRun(Record, frozen=True, kw_only=True):
    """An implementation and mode that was asked for and does not run here."""

    implementation: str
    mode: Mode
    reason: str


class BenchLine(Record, frozen=True, kw_only=True):
    """One result of the benchmark: one of these."""

    machine: BenchMachine | None = None
    check: BenchCheck | None = None
    row: BenchRow | None = None
    not_run: NotRun | None = None


class BenchShare(Record, frozen=True, kw_only=True):
    """The work of one group of processes: a check and the cases of one implementation and mode."""

    order: BenchOrder
    implementation: str = "dense"
    mode: Mode = "single"
    machine: BenchMachine | None = None
    """None: the machine is to be described, and nothing else is done."""
    is_checked: bool = False
    """True if there is nothing to check before the first case."""
    rows: tuple[BenchRow, ...] = ()
    """The cases that are done."""

    @property
    def processes(self) -> int:
        """Number of processes: one for each GPU, or one for all if threads share them."""
        in_threads = self.mode == "data parallel" and self.order.device == "cuda"
        return 1 if self.mode == "single" or in_threads else self.order.gpus

    def case(self, direction: Direction) -> BenchRow:
        """The case of a direction without a length; DataParallel has a sequence for each GPU."""
        gpus = 1 if self.mode == "single" else self.order.gpus
        return BenchRow(
            implementation=self.implementation,
            mode=self.mode,
            direction=direction,
            length_tokens=None,
            batch=gpus if self.mode == "data parallel" else 1,
            gpus=gpus,
            result="fits",
        )

    def next_case(self) -> BenchRow | None:
        """The case after those that are done; None at the end."""
        most = self.order.most_tokens
        if self.implementation == "reference":
            most = min(most, REFERENCE_TOKENS[self.order.device])
        for direction in self.order.directions:
            case = self.case(direction)
            done = [row for row in self.rows if row.direction == direction]
            tried = {row.length_tokens: row for row in done if row.batch == case.batch}
            last = next(reversed(tried.values()), None)
            if last is not None and last.fits and self.mode == "single":
                batches = BATCHES if last.length_tokens in BATCH_TOKENS else ()
                tried_with = {row.batch for row in done if row.length_tokens == last.length_tokens}
                for batch in batches:
                    if batch not in tried_with:
                        return case.replace(length_tokens=last.length_tokens, batch=batch)
            fits = {length: row.fits for length, row in tried.items() if length is not None}
            length = self.order.next_length(fits, most=most)
            if length is not None:
                return case.replace(length_tokens=length)
        return None


class BenchPart(Record, frozen=True, kw_only=True):
    """Word of one process of a group on its part: a result, or how else it ended."""

    ending: PartEnding = "done"
    reason: str = ""
    hint: str = ""
    machine: BenchMachine | None = None
    not_run: tuple[NotRun, ...] = ()
    """Told with the machine: what does not run on it."""
    differences: dict[str, float | None] = {}  # noqa: RUF012 -- msgspec copies it
    """Norm-relative differences from the reference; None where one is no number."""
    row: BenchRow | None = None


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
    """True if it ended by itself; not after Ctrl-C."""
