"""Contenders of the benchmark: how each attention is built, whether it runs on this machine, and
how many times each token attends to each key by its definition.

A new contender is a line of ``CONTENDERS`` and one of ``nouns/catalog/attentions.json``.

Shapes:  B sequences  H query heads  K key/value heads  S tokens  D head size
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from highwater.engine.attention.block_flex import attend_table_of, takes
from highwater.engine.attention.block_gather import attend_by_gather, block_sparse_attention
from highwater.engine.attention.block_table import block_tables
from highwater.engine.attention.branch_attention import Sharing
from highwater.engine.attention.branch_kernel import attend_branches, branches_obstacle
from highwater.engine.attention.branches import dilated_branches
from highwater.engine.attention.dense import attend
from highwater.engine.attention.dilated import dilated_attention
from highwater.engine.attention.plain_block import reference_attention
from highwater.engine.attention.ring import Ring, attend_in_ring
from highwater.engine.parallel.collectives import attend_sharded
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import MachineError
from highwater.nouns.attention_bench import IMPLEMENTATIONS, SHARES, BenchOrder, FusedKernel, Mode
from highwater.nouns.hardware import Kernel, kernels
from highwater.nouns.sparse_pattern import SparsePatternConfig, causal_pairs, dilated_pairs

Compute = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, float]]
"""From queries BHSD, keys and values BKSD: output BHSD, and share of the causal pairs computed."""
_BACKENDS: dict[FusedKernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_CPU_WINDOW = 512
"""Window of ``window`` on the CPU, in tokens, as sequences are short there."""
_OTHERS = "name others by `--implementations`"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What an attention is measured with: order, mode, device, kernel and pattern."""

    order: BenchOrder
    name: str
    mode: Mode
    device: torch.device
    dtype: torch.dtype
    kernel: FusedKernel | None
    """Fused kernel of dense attention; None if none runs here."""
    pattern: SparsePatternConfig | None
    """Sparse pattern within each branch; None: everything is kept."""

    @classmethod
    def of(
        cls,
        order: BenchOrder,
        name: str,
        mode: Mode,
        device: torch.device,
        kernel: FusedKernel | None,
    ) -> "Conditions":
        """Return the conditions of one implementation, by the order of the benchmark."""
        pattern = order.patterns.get(name, IMPLEMENTATIONS[name].pattern)
        if name == "window" and device.type == "cpu" and pattern is not None:
            pattern = pattern.replace(local_window_size=_CPU_WINDOW)
        return cls(order, name, mode, device, DTYPES[order.dtype], kernel, pattern)

    @property
    def ranks(self) -> int:
        """Number of GPUs, which share each sequence, or in data parallel mode the batch."""
        return 1 if self.mode == "single" else self.order.gpus

    @property
    def heads_of_qkv(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        return self.order.heads, self.order.kv_heads, self.order.kv_heads

    @property
    def scaling(self) -> float:
        """Factor of the attention scores: 1 / sqrt(head size)."""
        return self.order.head_dim**-0.5

    @property
    def block_kernel(self) -> Kernel:
        """Kernel whose operators compute blocks of attention."""
        return "cudnn" if self.kernel == "cudnn" else "flash"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks that share a sequence; None if each sequence is whole."""
        if self.mode not in ("ring", "ulysses"):
            return None
        group = dist.group.WORLD
        assert group is not None, "the ranks have joined"
        return group

    def layout(self, length: int) -> SequenceLayout:
        """Return the layout of a sequence over the ranks."""
        ranks = {"ring": (1, self.ranks), "ulysses": (self.ranks, 1)}.get(self.mode, (1, 1))
        return SequenceLayout((length,), *ranks)

    def branches(self, length: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return segment lengths and dilation rates for sequences of this length."""
        if not IMPLEMENTATIONS[self.name].takes_segments:
            return (length,), (1,)
        halves = (max(1, length // 2), length)
        return self.order.segment_lengths or halves, self.order.dilation_rates

    def short(self) -> "Conditions":
        """Return conditions whose pattern keeps some blocks of a short sequence, but not all."""
        pattern = self.pattern
        if pattern is None:
            return self
        sizes: dict[str, float] = {"local_window_size": 100}
        if not pattern.is_windowed:
            ratio = 0.4 if IMPLEMENTATIONS[self.name].takes_segments else 0.6
            # on an H100 FlexAttention takes no smaller block for heads of 128
            sizes = {"sparsity_ratio": ratio, "block_size": min(128, pattern.block_size)}
        return replace(self, pattern=pattern.replace(**sizes))

    def share(self, length: int) -> float:
        """Share of the causal pairs that the branches compute."""
        heads = self.order.heads
        pairs = dilated_pairs(*self.branches(length), length, heads=heads, pattern=self.pattern)
        return pairs / (heads * causal_pairs(length))


Build = Callable[[Conditions, int], Compute]
"""Builds an attention for sequences of a length."""


def counts(conditions: Conditions, length: int) -> Tensor:
    """Count how many times each token attends to each key, HSS, as the papers define it: head j
    attends over the tokens ``j mod rate :: rate`` of a segment, of which a pattern keeps some.
    """
    pattern = None if conditions.pattern is None else conditions.pattern.at(length)
    counts_HSS = torch.zeros(conditions.order.heads, length, length)
    for segment, rate in zip(*conditions.branches(length), strict=True):
        for start in range(0, length, segment):
            stop = min(start + segment, length)
            for head in range(conditions.order.heads):
                row = torch.arange(start, stop)[head % rate :: rate]
                counts_HSS[head, row[:, None], row] += _kept(pattern, len(row))
    return counts_HSS


@lru_cache
def _kept(config: SparsePatternConfig | None, length: int) -> Tensor:
    """1 where a token of a row attends to another, else 0, causally; shape SS."""
    token_S1, key_S = torch.arange(length)[:, None], torch.arange(length)
    causal_SS = (key_S <= token_S1).float()
    if config is None or not length:
        return causal_SS
    if config.is_windowed:
        is_seen_SS = key_S > token_S1 - config.local_window_size
        if config.pattern_type == "global_local":
            is_seen_SS |= key_S < config.global_tokens
        return causal_SS * is_seen_SS
    (table,) = block_tables(config, length, torch.device("cpu"))
    kept_RR = torch.zeros(table.rows, table.rows)
    kept_RR[table.row_of_entry, table.columns[0].long()] = 1
    size = config.block_size
    whole = kept_RR.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return whole[:length, :length] * causal_SS


def fused_kernel(conditions: Conditions) -> FusedKernel | None:
    """Return the fastest fused kernel that passes a small forward and backward run, or None."""
    device = conditions.device
    names: tuple[FusedKernel, ...] = ("flash",)
    if device.type == "cuda":
        names = (*kernels(torch.cuda.get_device_capability(device)), "efficient")
    size = conditions.order.head_dim
    query, key, value = (
        torch.zeros((1, heads, 128, size), device=device, dtype=conditions.dtype)
        for heads in conditions.heads_of_qkv
    )
    for name in names:
        try:
            compute = _dense(replace(conditions, kernel=name), 128)
            compute(query.requires_grad_(), key, value)[0].sum().backward()
        except RuntimeError:
            continue
        return name
    return None


def _reference(conditions: Conditions, length: int) -> Compute:
    def compute(*qkv: Tensor) -> tuple[Tensor, float]:
        packed, batch = [t.transpose(1, 2).flatten(0, 1) for t in qkv], len(qkv[0])
        found = reference_attention(
            *packed, document_lengths=[length] * batch, scaling=conditions.scaling
        )
        return found.unflatten(0, (batch, length)).transpose(1, 2).to(qkv[0].dtype), 1.0

    return compute


def _dense(conditions: Conditions, _: int) -> Compute:
    assert conditions.kernel is not None
    backend, order = _BACKENDS[conditions.kernel], conditions.order

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        with sdpa_kernel([backend]):
            output = F.scaled_dot_product_attention(
                *(query_BHSD, key_BKSD, value_BKSD),
                is_causal=True,
                scale=conditions.scaling,
                enable_gqa=order.heads != order.kv_heads,
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


def _without_flex(conditions: Conditions) -> str | None:
    if conditions.device.type == "cpu":
        return "FlexAttention has no backward pass on the CPU"
    return _in_replicas(conditions)


def _in_replicas(conditions: Conditions) -> str | None:
    if conditions.mode != "data parallel" or conditions.device.type == "cpu":
        return None
    return (
        "DataParallel runs its replicas in threads, where PyTorch compiles no FlexAttention, and "
        "gathered keys are no figure of it"
    )


def _block_sparse(conditions: Conditions, _: int) -> Compute:
    config = conditions.pattern
    assert config is not None, "it has a pattern"

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        attend = attend_table_of("auto", config, query_BHSD, key_BKSD.shape[1])
        if attend is attend_by_gather and takes(query_BHSD.device, query_BHSD.dtype, config):
            raise MachineError(
                "FlexAttention, which computes block-sparse attention here, was not proven, and "
                "gathered keys are no figure of it",
                hint=_OTHERS,
            )
        qkv = (query_BHSD, key_BKSD, value_BKSD)
        found = block_sparse_attention(
            *qkv, pattern=config, scaling=conditions.scaling, attend_table=attend
        )
        return found.output_BHSD, found.kept_share

    return compute


def _dense_flex(conditions: Conditions, length: int) -> Compute:
    """Build dense attention by FlexAttention: a pattern that keeps every block."""
    every = SparsePatternConfig(sparsity_ratio=1.0)
    return _block_sparse(replace(conditions, pattern=every), length)


def _dilated(conditions: Conditions, length: int) -> Compute:
    segments, rates = conditions.branches(length)
    share = conditions.share(length)
    run = partial(
        dilated_attention,
        segment_lengths=segments,
        dilation_rates=rates,
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
    )
    return lambda *qkv: (run(*qkv)[0], share)


def _ring(conditions: Conditions, length: int) -> Compute:
    layout, group = conditions.layout(length), conditions.group
    assert group is not None, "a ring shares it"
    ring = Ring(
        held_lengths=tuple(each // conditions.ranks for each in layout.padded_lengths),
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
        group=group,
    )
    return lambda *qkv: (attend_in_ring(*qkv, ring=ring).transpose(1, 2), 1.0)


def _branches(conditions: Conditions, length: int) -> Compute:
    """Build block-sparse attention by branches, of a sequence held whole or shared by a ring."""
    config = conditions.pattern
    assert config is not None, "it has a pattern"
    sharing = Sharing(
        layout=conditions.layout(length),
        branches=dilated_branches(*conditions.branches(length), conditions.order.heads),
        pattern=config,
        scaling=conditions.scaling,
        group=conditions.group,
    )
    share = conditions.share(length)

    def compute(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, float]:
        if takes(query_BHSD.device, query_BHSD.dtype, config):
            reason = branches_obstacle(sharing, query_BHSD, key_BKSD.shape[1])
            if reason is not None:
                raise MachineError(f"{reason}, and gathered keys are no figure of it", hint=_OTHERS)
        return attend_branches(query_BHSD, key_BKSD, value_BKSD, sharing=sharing)[0], share

    return compute


def _ulysses(conditions: Conditions, length: int) -> Compute:
    inner = partial(
        attend,
        document_lengths=conditions.layout(length).padded_lengths,
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
    )
    group = conditions.group
    assert group is not None, "ranks share it"
    return lambda *qkv: (attend_sharded(*qkv, group=group, attend=inner).transpose(1, 2), 1.0)


def _heads_not_shared(conditions: Conditions) -> str | None:
    ranks, (heads, kv_heads, _) = conditions.ranks, conditions.heads_of_qkv
    if heads % ranks:
        return f"{ranks} GPUs do not divide {heads} heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{ranks} GPUs and {kv_heads} key/value heads: neither divides the other"
    return _without_block_kernel(conditions)


class AttentionContender(NamedTuple):
    """One attention of the benchmark: how it is built, and what it cannot run."""

    build: Build
    obstacle: Callable[[Conditions], str | None] = _in_replicas
    """Says why the attention does not run under these conditions; None if it does."""


CONTENDERS: Mapping[str, AttentionContender] = {
    "reference": AttentionContender(_reference),
    "dense": AttentionContender(_dense, _without_fused_kernel),
    "dense_flex": AttentionContender(_dense_flex, _without_flex),
    **dict.fromkeys(("window", "block_sparse", *SHARES), AttentionContender(_block_sparse)),
    "dilated": AttentionContender(_dilated, _without_block_kernel),
    "block_sparse_ring_dilated": AttentionContender(_branches),
    "ring": AttentionContender(_ring, _without_block_kernel),
    "block_sparse_ring": AttentionContender(_branches),
    "ulysses": AttentionContender(_ulysses, _heads_not_shared),
}
"""All contenders, by their name in ``IMPLEMENTATIONS``."""
