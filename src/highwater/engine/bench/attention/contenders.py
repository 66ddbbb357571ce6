"""Contenders of the benchmark: how each attention is built, whether it runs on this machine, and
how many times each token attends to each key by its definition.

A new contender is a line of ``CONTENDERS`` and one of ``nouns/catalog/attentions.json``.

Shapes:  B sequences  H query heads  K key/value heads  S tokens  D head size
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from highwater.engine.attention.block_flex import attend_by_flex, takes
from highwater.engine.attention.block_gather import attend_by_gather, block_sparse_attention
from highwater.engine.attention.block_table import block_tables
from highwater.engine.attention.branch_attention import Sharing, branch_attention
from highwater.engine.attention.branches import dilated_branches
from highwater.engine.attention.dense import attend
from highwater.engine.attention.dilated import dilated_attention
from highwater.engine.attention.plain_block import reference_attention
from highwater.engine.attention.ring import Ring, attend_in_ring
from highwater.engine.parallel.collectives import attend_sharded
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns.attention_bench import IMPLEMENTATIONS, SHARES, BenchShare, FusedKernel
from highwater.nouns.hardware import Kernel, kernels
from highwater.nouns.sparse_pattern import SparsePatternConfig, causal_pairs, dilated_pairs

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries BHSD, keys and values BKSD: output BHSD."""
_BACKENDS: dict[FusedKernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What an attention is measured with: order and mode, device, kernel and pattern."""

    share: BenchShare
    device: torch.device
    dtype: torch.dtype
    kernel: FusedKernel | None
    """Fused kernel of dense attention; None if none runs here."""
    pattern: SparsePatternConfig | None
    """Sparse pattern within each branch; None: everything is kept."""

    @classmethod
    def of(
        cls, share: BenchShare, device: torch.device, kernel: FusedKernel | None
    ) -> "Conditions":
        """Return the conditions of the implementation and mode that ``share`` measures."""
        name = share.implementation
        pattern = share.order.patterns.get(name, IMPLEMENTATIONS[name].pattern)
        if name == "window" and device.type == "cpu" and pattern is not None:
            pattern = pattern.replace(local_window_size=512)  # sequences are short there
        return cls(share, device, DTYPES[share.order.dtype], kernel, pattern)

    @property
    def devices(self) -> list[torch.device]:
        """Devices that this process uses: its own, or all GPUs under DataParallel's threads."""
        if self.share.processes == self.share.gpus:
            return [self.device]
        return [torch.device("cuda", index) for index in range(self.share.gpus)]

    @property
    def heads_of_qkv(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        order = self.share.order
        return order.heads, order.kv_heads, order.kv_heads

    @property
    def scaling(self) -> float:
        """Factor of the attention scores: 1 / sqrt(head size)."""
        return self.share.order.head_dim**-0.5

    @property
    def block_kernel(self) -> Kernel:
        """Kernel whose operators compute blocks of attention."""
        return "cudnn" if self.kernel == "cudnn" else "flash"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks that share a sequence; None if each sequence is whole."""
        return dist.group.WORLD if self.share.mode in ("ring", "ulysses") else None

    def layout(self, length: int) -> SequenceLayout:
        """Return the layout of a sequence over the ranks."""
        ranks = self.share.gpus
        degrees = {"ring": (1, ranks), "ulysses": (ranks, 1)}.get(self.share.mode, (1, 1))
        return SequenceLayout((length,), *degrees)

    def branches(self, length: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return segment lengths and dilation rates for sequences of this length."""
        order = self.share.order
        if not IMPLEMENTATIONS[self.share.implementation].takes_segments:
            return (length,), (1,)
        halves = (max(1, length // 2), length)
        return order.segment_lengths or halves, order.dilation_rates

    def short(self) -> "Conditions":
        """Return conditions whose pattern keeps some blocks of a short sequence, but not all."""
        pattern = self.pattern
        if pattern is None:
            return self
        sizes: dict[str, float] = {"local_window_size": 100}
        if not pattern.is_windowed:
            ratio = 0.4 if IMPLEMENTATIONS[self.share.implementation].takes_segments else 0.6
            # on an H100 FlexAttention takes no smaller block for heads of 128
            sizes = {"sparsity_ratio": ratio, "block_size": min(128, pattern.block_size)}
        return replace(self, pattern=pattern.replace(**sizes))

    def kept_share(self, length: int) -> float:
        """Share of the causal pairs that are computed, counted by element."""
        heads = self.share.order.heads
        pairs = dilated_pairs(*self.branches(length), length, heads=heads, pattern=self.pattern)
        return pairs / (heads * causal_pairs(length))


Build = Callable[[Conditions, int], Compute]
"""Builds an attention for sequences of a length."""


def counts(conditions: Conditions, length: int) -> Tensor:
    """Count how many times each token attends to each key, HSS, as the papers define it: head j
    attends over the tokens ``j mod rate :: rate`` of a segment, of which a pattern keeps some.
    """
    pattern = None if conditions.pattern is None else conditions.pattern.at(length)
    heads = conditions.share.order.heads
    counts_HSS = torch.zeros(heads, length, length)
    for segment, rate in zip(*conditions.branches(length), strict=True):
        for start in range(0, length, segment):
            for head in range(heads):
                row = torch.arange(length)[start : start + segment][head % rate :: rate]
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
    size = conditions.share.order.head_dim
    query, key, value = (
        torch.zeros((1, heads, 128, size), device=device, dtype=conditions.dtype)
        for heads in conditions.heads_of_qkv
    )
    for name in names:
        try:
            compute = _dense(replace(conditions, kernel=name), 128)
            compute(query.requires_grad_(), key, value).sum().backward()
        except RuntimeError:
            continue
        return name
    return None


def _reference(conditions: Conditions, length: int) -> Compute:
    def compute(*qkv: Tensor) -> Tensor:
        packed, batch = [t.transpose(1, 2).flatten(0, 1) for t in qkv], len(qkv[0])
        found = reference_attention(
            *packed, document_lengths=[length] * batch, scaling=conditions.scaling
        )
        return found.unflatten(0, (batch, length)).transpose(1, 2).to(qkv[0].dtype)

    return compute


def _dense(conditions: Conditions, _: int) -> Compute:
    assert conditions.kernel is not None
    backend, (heads, kv_heads, _) = _BACKENDS[conditions.kernel], conditions.heads_of_qkv

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        is_grouped, scale = heads != kv_heads, conditions.scaling
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
            )

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
    if conditions.share.mode != "data parallel" or conditions.device.type == "cpu":
        return None
    return (
        "DataParallel runs its replicas in threads, where PyTorch compiles no FlexAttention, and "
        "gathered keys are no figure of it"
    )


def _block_sparse(conditions: Conditions, _: int) -> Compute:
    config = conditions.pattern
    assert config is not None, "it has a pattern"
    by_flex = takes(conditions.device, conditions.dtype, config)  # its check is the proof
    attend_sparsely = partial(
        block_sparse_attention,
        pattern=config,
        scaling=conditions.scaling,
        attend_table=attend_by_flex if by_flex else attend_by_gather,
    )
    return lambda *qkv: attend_sparsely(*qkv).output_BHSD


def _dense_flex(conditions: Conditions, length: int) -> Compute:
    """Build dense attention by FlexAttention: a pattern that keeps every block."""
    every = SparsePatternConfig(sparsity_ratio=1.0)
    return _block_sparse(replace(conditions, pattern=every), length)


def _dilated(conditions: Conditions, length: int) -> Compute:
    segments, rates = conditions.branches(length)
    return lambda *qkv: dilated_attention(
        *qkv,
        segment_lengths=segments,
        dilation_rates=rates,
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
    )[0]


def _ring(conditions: Conditions, length: int) -> Compute:
    layout, group = conditions.layout(length), conditions.group
    assert group is not None, "a ring shares it"
    ring = Ring(
        held_lengths=tuple(each // layout.degree for each in layout.padded_lengths),
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
        group=group,
    )
    return lambda *qkv: attend_in_ring(*qkv, ring=ring).transpose(1, 2)


def _branches(conditions: Conditions, length: int) -> Compute:
    """Build block-sparse attention by branches, of a sequence held whole or shared by a ring."""
    config = conditions.pattern
    assert config is not None, "it has a pattern"
    sharing = Sharing(
        layout=conditions.layout(length),
        branches=dilated_branches(*conditions.branches(length), conditions.share.order.heads),
        pattern=config,
        scaling=conditions.scaling,
        group=conditions.group,
        by_flex=takes(conditions.device, conditions.dtype, config),
    )
    return lambda *qkv: branch_attention(*qkv, sharing=sharing)[0]


def _ulysses(conditions: Conditions, length: int) -> Compute:
    inner = partial(
        attend,
        document_lengths=conditions.layout(length).padded_lengths,
        scaling=conditions.scaling,
        kernel=conditions.block_kernel,
    )
    group = conditions.group
    assert group is not None, "ranks share it"
    return lambda *qkv: attend_sharded(*qkv, group=group, attend=inner).transpose(1, 2)


def _heads_not_shared(conditions: Conditions) -> str | None:
    ranks, (heads, kv_heads, _) = conditions.share.gpus, conditions.heads_of_qkv
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


CONTENDERS: dict[str, AttentionContender] = {
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
