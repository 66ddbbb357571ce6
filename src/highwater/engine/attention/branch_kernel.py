"""Branch kernel: compute branches by FlexAttention if a proof passes, else by gathered keys."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from torch import Tensor

from highwater.engine.attention.block_flex import SparseKernel, takes
from highwater.engine.attention.branch_attention import Sharing, branch_attention
from highwater.engine.attention.branches import Branch
from highwater.engine.attention.kernel_proof import PROVEN_BLOCKS, ProofSizes, deviations_of, flaw
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns.sparse_pattern import SparsePatternConfig

_DENSE = SparsePatternConfig()
"""Stands for "no pattern" when FlexAttention asks for a block size: every block is kept."""


def attend_branches(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    *,
    sharing: Sharing,
    implementation: SparseKernel = "auto",
) -> tuple[Tensor, Tensor]:
    """Run ``branch_attention``, by FlexAttention if that is requested, or proven on small input."""
    is_flex, pattern = implementation == "flex", sharing.pattern or _DENSE
    if implementation == "auto" and takes(query_BHTD.device, query_BHTD.dtype, pattern):
        reason = branches_obstacle(sharing, query_BHTD, key_BKTD.shape[1])
        is_flex = reason is None
        if not is_flex:
            warnings.warn(f"{reason}; keys are gathered instead", stacklevel=2)
    sharing = replace(sharing, by_flex=is_flex)
    return branch_attention(query_BHTD, key_BKTD, value_BKTD, sharing=sharing)


def branches_obstacle(sharing: Sharing, query_BHTD: Tensor, kv_heads: int) -> str | None:
    """Reason why FlexAttention differs from gathered keys on small input; None if equal."""
    block = (sharing.pattern or _DENSE).block_size
    sizes = ProofSizes(
        groups=query_BHTD.shape[1] // kv_heads,
        tokens=PROVEN_BLOCKS * block + 1,
        head_dim=query_BHTD.shape[-1],
        dtype=query_BHTD.dtype,
        device=query_BHTD.device,
    )
    half, branches = sizes.tokens // 2, sharing.branches
    segments = tuple(b if b.segment is None else b._replace(segment=half) for b in branches)
    return proof_of_branches(sizes, segments, sharing.pattern, is_causal=sharing.is_causal)


@lru_cache(maxsize=64)
def proof_of_branches(
    sizes: ProofSizes,
    branches: tuple[Branch, ...],
    pattern: SparsePatternConfig | None,
    *,
    is_causal: bool,
) -> str | None:
    """Return why FlexAttention fails the proof, or None; cached, as every layer calls this."""
    return flaw(partial(branch_deviations, sizes, branches, pattern, is_causal=is_causal), sizes)


def branch_deviations(
    sizes: ProofSizes,
    branches: tuple[Branch, ...],
    pattern: SparsePatternConfig | None,
    *,
    is_causal: bool = True,
) -> Iterator[float]:
    """Yield norm-relative errors of FlexAttention against gathered keys, on two documents whose
    last tiles are not full: of output, log-sum-exp, gradients.
    """
    first = sizes.tokens // 3
    sharing = Sharing(
        layout=SequenceLayout((first, sizes.tokens - first)),
        branches=branches,
        pattern=pattern,
        scaling=sizes.head_dim**-0.5,
        is_causal=is_causal,
    )
    one, other = (
        partial(branch_attention, sharing=replace(sharing, by_flex=by_flex))
        for by_flex in (True, False)
    )
    yield from deviations_of(one, other, sizes)
