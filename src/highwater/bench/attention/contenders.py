"""The attentions that a benchmark compares: how each is made, whether it runs here, and by its
definition how many times each token meets each key.

A new one is a line of ``CONTENDERS``, and one of ``IMPLEMENTATIONS`` in ``spec/attention_bench``.

Shapes:  B sequences  H query heads  K key/value heads  S tokens  D head size
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from highwater.attention.block_flex import attend_table_of, takes
from highwater.attention.block_gather import attend_by_gather, block_sparse_attention
from highwater.attention.block_table import block_tables, kept_share
from highwater.attention.branch_attention import Sharing
from highwater.attention.branch_kernel import attend_branches, branches_obstacle
from highwater.attention.branches import Branch
from highwater.attention.dense import attend
from highwater.attention.dilated import dilated_attention
from highwater.attention.reference import reference_attention
from highwater.attention.ring import Ring, attend_in_ring
from highwater.attention.ulysses import attend_sharded
from highwater.errors import MachineError
from highwater.parallel.sequence_layout import SequenceLayout
from highwater.spec.attention_bench import FusedKernel, Mode
from highwater.spec.hardware import Kernel, kernels
from highwater.spec.sparse_costs import causal_pairs
from highwater.spec.sparse_pattern import SparsePatternConfig

Compute = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, float]]
"""Attention of queries BHSD, keys and values BKSD: the output, BHSD, and the share of the causal
pairs that was computed."""
_BACKENDS: dict[FusedKernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_WINDOWS = {"cuda": 4096, "cpu": 512}
"""Tokens of ``window``, by device."""
_OTHERS = "name others by `--implementations`"
_CHECKED_WINDOW = 100
_CHECKED_RATIO = 0.6
"""Of the short sequence that is checked, where smaller ones keep a block alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What contenders run under."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    ranks: int = 1
    """Processes that share a sequence."""
    kernel: FusedKernel | None = None
    """What dense attention runs on; None where no fused kernel does."""

    @property
    def scaling(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5

    @property
    def block_kernel(self) -> Kernel:
        """The kernel whose operators blocks of attention are made of."""
        return "cudnn" if self.kernel == "cudnn" else "flash"

    def layout(self, mode: Mode, length: int) -> SequenceLayout:
        """How ranks share a sequence."""
        ranks = {"ring": (1, self.ranks), "ulysses": (self.ranks, 1)}.get(mode, (1, 1))
        return SequenceLayout((length,), *ranks)


def _runs(_: Conditions) -> str | None:
    return None


def _causal(_: Conditions, length: int) -> Tensor:
    return torch.ones(length, length).tril()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContender:
    """One that takes part."""

    build: Callable[[Conditions, int], Compute]
    """Makes it, for sequences of a length."""
    obstacle: Callable[[Conditions], str | None] = _runs
    """Why it does not run under these conditions; None where it does."""
    counts: Callable[[Conditions, int], Tensor] = _causal
    """How many times each token meets each key, SS or HSS: by the definition, for the check."""
    variants: tuple["AttentionContender", ...] = ()
    """The same with other sizes, which are checked too: of a short sequence the own keep little."""
    most_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Longest length that is tried, by device; any, where there is none."""


def fused_kernel(conditions: Conditions) -> FusedKernel | None:
    """The fastest fused kernel that a small forward and backward pass shows to run."""
    device = conditions.device
    names: tuple[FusedKernel, ...] = ("flash",)
    if device.type == "cuda":
        names = (*kernels(torch.cuda.get_device_capability(device)), "efficient")
    for name in names:
        heads = (conditions.heads, conditions.kv_heads, conditions.kv_heads)
        q, k, v = (
            torch.zeros(
                (1, count, 128, conditions.head_dim),
                device=device,
                dtype=conditions.dtype,
                requires_grad=True,
            )
            for count in heads
        )
        try:
            _dense(replace(conditions, kernel=name), 128)(q, k, v)[0].sum().backward()
        except RuntimeError:
            continue
        return name
    return None


def _reference(conditions: Conditions, length: int) -> Compute:
    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        packed = [t.transpose(1, 2).flatten(0, 1) for t in (query_BHSD, key_BKSD, value_BKSD)]
        batch = len(query_BHSD)
        found = reference_attention(
            *packed, document_lengths=[length] * batch, scaling=conditions.scaling
        )
        return found.unflatten(0, (batch, length)).transpose(1, 2).to(query_BHSD.dtype), 1.0

    return compute


def _dense(conditions: Conditions, length: int) -> Compute:
    assert length
    assert conditions.kernel is not None
    backend, is_grouped = _BACKENDS[conditions.kernel], conditions.heads != conditions.kv_heads

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        with sdpa_kernel([backend]):
            output = F.scaled_dot_product_attention(
                *(query_BHSD, key_BKSD, value_BKSD),
                is_causal=True,
                scale=conditions.scaling,
                enable_gqa=is_grouped,
            )
        return output, 1.0

    return compute


def _without_fused_kernel(conditions: Conditions) -> str | None:
    if conditions.kernel is not None:
        return None
    return f"no fused kernel of PyTorch runs here in {conditions.dtype}"


def _without_block_kernel(conditions: Conditions) -> str | None:
    if conditions.kernel in ("cudnn", "flash"):
        return None
    return (
        f"neither cuDNN's nor the flash kernel runs here in {conditions.dtype}: it takes fp16 or "
        f"bf16 and a GPU of compute capability 8.0 or newer"
    )


def _not_on_the_cpu(conditions: Conditions) -> str | None:
    if conditions.device.type == "cuda":
        return None
    return "FlexAttention has no backward pass on the CPU"


def _pattern(config: SparsePatternConfig, *variants: SparsePatternConfig) -> AttentionContender:
    """Block-sparse attention by a pattern."""
    return AttentionContender(
        build=partial(_block_sparse, config),
        counts=partial(_pattern_counts, config),
        variants=tuple(_pattern(each) for each in variants),
    )


def _block_sparse(config: SparsePatternConfig, conditions: Conditions, length: int) -> Compute:
    assert length

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        attend = attend_table_of("auto", config, query_BHSD, key_BKSD.shape[1])
        if attend is attend_by_gather and takes(query_BHSD.device, query_BHSD.dtype, config):
            raise MachineError(
                "FlexAttention, which computes block-sparse attention here, was not proven, and "
                "gathered keys are no figure of it",
                hint=_OTHERS,
            )
        found = block_sparse_attention(
            query_BHSD,
            key_BKSD,
            value_BKSD,
            pattern=config,
            scaling=conditions.scaling,
            attend_table=attend,
        )
        return found.output_BHSD, found.kept_share

    return compute


def _pattern_counts(config: SparsePatternConfig, _: Conditions, length: int) -> Tensor:
    """A window by its definition; of a ratio the blocks are the table's, and what is seen of them
    is told here.
    """
    token_S1, key_S = torch.arange(length)[:, None], torch.arange(length)
    if config.is_windowed:
        return ((key_S <= token_S1) & (key_S > token_S1 - config.local_window_size)).float()
    (table,) = block_tables(config, length, torch.device("cpu"))
    kept_RR = torch.zeros(table.rows, table.rows)
    kept_RR[table.row_of_entry, table.columns[0].long()] = 1
    size = config.block_size
    whole = kept_RR.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return whole[:length, :length] * (key_S <= token_S1)


def _by_ratio(ratio: float | Literal["adaptive"]) -> AttentionContender:
    config = SparsePatternConfig(sparsity_ratio=ratio)
    return _pattern(config, SparsePatternConfig(sparsity_ratio=_CHECKED_RATIO))


def _window(conditions: Conditions, length: int) -> Compute:
    tokens = _WINDOWS[conditions.device.type]
    return _block_sparse(_window_config(tokens), conditions, length)


def _window_counts(conditions: Conditions, length: int) -> Tensor:
    tokens = _WINDOWS[conditions.device.type]
    return _pattern_counts(_window_config(tokens), conditions, length)


def _window_config(tokens: int) -> SparsePatternConfig:
    return SparsePatternConfig(pattern_type="local_window", local_window_size=tokens)


def _dilated(conditions: Conditions, length: int) -> Compute:
    share = _dilated_share(length)

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        output, _ = dilated_attention(
            *(query_BHSD, key_BKSD, value_BKSD),
            scaling=conditions.scaling,
            kernel=conditions.block_kernel,
        )
        return output, share

    return compute


def _published_branches(length: int) -> tuple[tuple[int, int], ...]:
    """Segment length and rate of each branch."""
    return (max(1, length // 2), 1), (length, 2)


def _dilated_share(length: int) -> float:
    """Pairs of the first head that its branches compute, of all causal ones."""
    pairs = 0
    for segment, rate in _published_branches(length):
        whole, rest = divmod(length, segment)
        pairs += whole * causal_pairs(-(-segment // rate)) + causal_pairs(-(-rest // rate))
    return pairs / causal_pairs(length)


def _dilated_counts(conditions: Conditions, length: int) -> Tensor:
    """By the paper: head j attends over the tokens ``j mod rate :: rate`` of each segment."""
    token = torch.arange(length)
    causal = token <= token[:, None]
    counts_HSS = torch.zeros(conditions.heads, length, length)
    for segment, rate in _published_branches(length):
        for head in range(conditions.heads):
            has = token % segment % rate == head % rate
            same = token // segment == (token // segment)[:, None]
            counts_HSS[head] += same & has & has[:, None] & causal
    return counts_HSS


def _ring(conditions: Conditions, length: int) -> Compute:
    layout = conditions.layout("ring", length)
    ring = Ring(
        held_lengths=tuple(each // conditions.ranks for each in layout.padded_lengths),
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
        group=_everybody(),
    )

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        found = attend_in_ring(query_BHSD, key_BKSD, value_BKSD, ring=ring)
        return found.transpose(1, 2), 1.0

    return compute


def _sparse_ring(config: SparsePatternConfig, conditions: Conditions, length: int) -> Compute:
    sharing = Sharing(
        layout=conditions.layout("ring", length),
        branches=(Branch(),),
        pattern=config,
        scaling=conditions.scaling,
        group=_everybody(),
    )
    share = kept_share(block_tables(config, length, torch.device("cpu")))

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        if takes(query_BHSD.device, query_BHSD.dtype, config):
            reason = branches_obstacle(sharing, query_BHSD, key_BKSD.shape[1])
            if reason is not None:
                raise MachineError(f"{reason}, and gathered keys are no figure of it", hint=_OTHERS)
        return attend_branches(query_BHSD, key_BKSD, value_BKSD, sharing=sharing)[0], share

    return compute


def _by_ratio_in_ring(
    ratio: float | Literal["adaptive"], *variants: AttentionContender
) -> AttentionContender:
    config = SparsePatternConfig(sparsity_ratio=ratio)
    return AttentionContender(
        build=partial(_sparse_ring, config),
        counts=partial(_pattern_counts, config),
        variants=variants,
    )


def _ulysses(conditions: Conditions, length: int) -> Compute:
    inner = partial(
        attend,
        document_lengths=conditions.layout("ulysses", length).padded_lengths,
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
    )
    group = _everybody()

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        found = attend_sharded(query_BHSD, key_BKSD, value_BKSD, group=group, attend=inner)
        return found.transpose(1, 2), 1.0

    return compute


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    return group


def _heads_not_shared(conditions: Conditions) -> str | None:
    ranks, kv_heads = conditions.ranks, conditions.kv_heads
    if conditions.heads % ranks:
        return f"{ranks} GPUs do not divide {conditions.heads} heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{ranks} GPUs and {kv_heads} key/value heads: neither divides the other"
    return _without_block_kernel(conditions)


CONTENDERS: Mapping[str, AttentionContender] = {
    "reference": AttentionContender(build=_reference, most_tokens={"cpu": 1024, "cuda": 8192}),
    "dense": AttentionContender(build=_dense, obstacle=_without_fused_kernel),
    "dense_flex": AttentionContender(
        # FlexAttention with every block kept: the mask PyTorch makes by itself has all pairs of
        # tokens once
        build=partial(_block_sparse, SparsePatternConfig(sparsity_ratio=1.0)),
        obstacle=_not_on_the_cpu,
    ),
    "window": AttentionContender(
        build=_window,
        counts=_window_counts,
        variants=(_pattern(_window_config(_CHECKED_WINDOW)),),
    ),
    "block_sparse_5": _by_ratio(0.05),
    "block_sparse_2": _by_ratio(0.02),
    "block_sparse_1": _by_ratio(0.01),
    "block_sparse_adaptive": _by_ratio("adaptive"),
    "dilated": AttentionContender(
        build=_dilated, obstacle=_without_block_kernel, counts=_dilated_counts
    ),
    "ring": AttentionContender(build=_ring, obstacle=_without_block_kernel),
    "block_sparse_ring": _by_ratio_in_ring("adaptive", _by_ratio_in_ring(_CHECKED_RATIO)),
    "ulysses": AttentionContender(build=_ulysses, obstacle=_heads_not_shared),
}
"""Everything that can take part, by its name in ``IMPLEMENTATIONS``."""
