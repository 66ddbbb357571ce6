"""Attention modules for any model: dilated, block-sparse, or both, over sequences held whole or
shared by the ranks of a group.

Queries, keys and values are (batch, length, heads, head_dim), like those of the package
dilated-attention-pytorch; keys and values may have fewer heads. A module stores nothing of a call,
so DataParallel's replicas, which are threads, are independent. Fused kernels need a GPU of compute
capability 8.0 and 16-bit dtypes; otherwise plain PyTorch computes the same.

Shapes:  B batch  T length, or this rank's share of it  H query heads  K key/value heads  D head_dim
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from highwater.engine.attention.block_flex import SparseKernel, attend_table_of, kernel_of
from highwater.engine.attention.block_gather import block_sparse_attention
from highwater.engine.attention.branch_attention import Sharing
from highwater.engine.attention.branch_kernel import attend_branches
from highwater.engine.attention.branches import Branch, dilated_branches, refuse_content
from highwater.engine.attention.dilated import Normalisation, dilated_attention
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import MachineError, UsageError
from highwater.nouns.sparse_pattern import (
    SparsePatternConfig,
    check_word,
    is_count,
    refuse_branches,
)

_FLASH_HEAD = 256
"""Largest head size that flash attention takes."""
Shares = Literal["contiguous", "zigzag"]
"""Tokens of a sequence that a rank holds. ``contiguous``: one slice, ranks in their order;
``zigzag``: chunks r and 2R - 1 - r of 2R, which balances the work of causal attention."""


class _AttentionModule(nn.Module):
    """Base of the attention modules: the scale, and checks of arguments."""

    def __init__(
        self,
        softmax_scale: float | None,
        attention_dropout: float,
        group: dist.ProcessGroup | None,
        shares: Shares,
    ) -> None:
        super().__init__()
        if attention_dropout:
            raise UsageError(
                f"attention_dropout {attention_dropout}: attention here has no dropout",
                hint="leave `attention_dropout` out, or drop out of what the module returns",
            )
        check_word("shares", shares, get_args(Shares))
        self.softmax_scale, self.group = softmax_scale, group
        self.shares: Shares = shares

    def _scaling(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def _by_branches(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        branches: tuple[Branch, ...],
        pattern: SparsePatternConfig | None,
        *,
        kernel: SparseKernel = "auto",
        is_causal: bool = True,
        document_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Attend by branches, over whole sequences or this rank's share of each; BHTD."""
        sharing = Sharing(
            layout=self._layout(inputs[0].shape[2], document_lengths),
            branches=branches,
            pattern=pattern,
            scaling=self._scaling(inputs[0]),
            is_causal=is_causal,
            group=self.group,
        )
        return attend_branches(*inputs, sharing=sharing, implementation=kernel_of(self, kernel))[0]

    def _layout(self, held: int, document_lengths: Sequence[int] | None) -> SequenceLayout:
        """Return the layout of a sequence over the group; UsageError if the shares do not fit."""
        degree = 1 if self.group is None else dist.get_world_size(self.group)
        is_zigzag = self.shares == "zigzag"
        lengths = (held * degree,) if document_lengths is None else tuple(document_lengths)
        ring, slices = (degree, 1) if is_zigzag else (1, degree)
        layout = SequenceLayout(lengths, ulysses_degree=slices, ring_degree=ring)
        if layout.tokens_per_rank != held:
            raise UsageError(
                f"{degree} ranks hold {layout.tokens_per_rank} tokens each of documents of "
                f"{', '.join(map(str, lengths))}, with their padding, and {held} are here",
                hint="give each rank the share that `SequenceLayout` has for it, or use lengths "
                f"that {2 * degree if is_zigzag else degree} divides",
            )
        return layout


class DilatedAttention(_AttentionModule):
    """LongNet's dilated attention, see ``attention.dilated``.

    ``normalisation="groups"`` is the convention of fkodom's package, for checkpoints trained with
    it. That package never applied its dropout nor its scale; a dropout is refused here.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        op: object | None = None,
        *,
        normalisation: Normalisation = "softmax",
        group: dist.ProcessGroup | None = None,
        shares: Shares = "contiguous",
    ) -> None:
        super().__init__(softmax_scale, attention_dropout, group, shares)
        if op is not None:
            raise UsageError(
                "`op` names an operator of xformers, which is not used here", hint="leave `op` out"
            )
        refuse_branches(segment_lengths, dilation_rates)
        check_word("normalisation", normalisation, get_args(Normalisation))
        if group is not None and normalisation == "groups":
            raise UsageError(
                "the groups' values are divided by their sum over the sequence, which no rank has",
                hint='use `normalisation="softmax"`, or leave `group` out',
            )
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.normalisation: Normalisation = normalisation

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """Attention output, of the shape of ``query``; zeros for tokens that are in no branch."""
        inputs = _heads_first(query, key, value)
        if self.normalisation == "groups" and not is_fused(inputs[0]):
            raise MachineError(
                f'normalisation="groups" in {inputs[0].dtype} has no kernel on this GPU',
                hint='use 16-bit numbers on compute capability 8.0, or `normalisation="softmax"`',
            )
        if self.group is None and is_fused(inputs[0]):
            output_BHTD, _ = dilated_attention(
                *inputs,
                segment_lengths=self.segment_lengths,
                dilation_rates=self.dilation_rates,
                scaling=self._scaling(query),
                is_causal=is_causal,
                normalisation=self.normalisation,
            )
        else:
            heads = inputs[0].shape[1]
            branches = dilated_branches(self.segment_lengths, self.dilation_rates, heads)
            output_BHTD = self._by_branches(inputs, branches, None, is_causal=is_causal)
        return output_BHTD.transpose(1, 2)


class BlockSparseAttention(_AttentionModule):
    """Causal block-sparse attention: one softmax over the keys that a pattern keeps.

    ``implementation="auto"`` uses FlexAttention's kernel on a GPU if a small proof passes, else
    (and in DataParallel's replicas) gathered keys.
    """

    def __init__(
        self,
        sparse_config: SparsePatternConfig | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        group: dist.ProcessGroup | None = None,
        shares: Shares = "contiguous",
        implementation: SparseKernel = "auto",
    ) -> None:
        super().__init__(softmax_scale, attention_dropout, group, shares)
        check_word("implementation", implementation, get_args(SparseKernel))
        self.implementation: SparseKernel = implementation
        self.sparse_config = SparsePatternConfig() if sparse_config is None else sparse_config
        if group is not None:
            refuse_content(self.sparse_config, "a ring")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = True,
        document_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Attention output, of the shape of ``query``.

        ``document_lengths``: lengths of the documents packed into each sequence (over all ranks
        together); each attends only to itself.
        """
        _refuse_order(is_causal)
        inputs, lengths = _heads_first(query, key, value), document_lengths
        if lengths is not None and not all(map(is_count, lengths)):
            raise UsageError(
                f"document_lengths {list(lengths)}", hint="use whole numbers of 1 or more"
            )
        pattern, kernel = self.sparse_config, self.implementation
        if self.group is None:
            tokens = query.shape[1]
            if lengths is not None and sum(lengths) != tokens:
                raise UsageError(
                    f"document_lengths add up to {sum(lengths)}, and a sequence has {tokens} "
                    "tokens",
                    hint="give the length of every document, padding as one of its own",
                )
            own = kernel_of(self, kernel)
            output_BHTD, *_ = block_sparse_attention(
                *inputs,
                pattern=pattern,
                scaling=self._scaling(query),
                document_lengths=lengths,
                attend_table=attend_table_of(own, pattern, inputs[0], inputs[1].shape[1]),
            )
        else:
            output_BHTD = self._by_branches(
                inputs, (Branch(),), pattern, kernel=kernel, document_lengths=lengths
            )
        return output_BHTD.transpose(1, 2)


class BlockSparseRingDilatedAttention(_AttentionModule):
    """Causal dilated attention, with a sparse pattern among the tokens of a segment that attend.

    Branches are mixed by their softmax denominators. With a group each rank holds an equal share of
    every sequence, and receives only the keys and values that some query of its own sees.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        sparse_config: SparsePatternConfig | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        group: dist.ProcessGroup | None = None,
        shares: Shares = "contiguous",
    ) -> None:
        super().__init__(softmax_scale, attention_dropout, group, shares)
        refuse_branches(segment_lengths, dilation_rates)
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.sparse_config = SparsePatternConfig() if sparse_config is None else sparse_config
        refuse_content(self.sparse_config, "a branch")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
        """Attention output, of the shape of ``q``; zeros for tokens that are in no branch."""
        _refuse_order(is_causal)
        inputs = _heads_first(q, k, v)
        heads = inputs[0].shape[1]
        branches = dilated_branches(self.segment_lengths, self.dilation_rates, heads)
        return self._by_branches(inputs, branches, self.sparse_config).transpose(1, 2)


def is_fused(query: Tensor) -> bool:
    """True if a fused kernel supports these queries; on the CPU it always does."""
    if query.device.type == "cpu":
        return True
    is_small = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= _FLASH_HEAD
    return is_small and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, BHTD, and keys and values, BKTD, in autocast's dtype if it is on."""
    shapes = [tuple(each.shape) for each in (query, key, value)]
    is_right = (
        all(len(shape) == 4 for shape in shapes)
        and shapes[1] == shapes[2]
        and shapes[0][:2] == shapes[1][:2]
        and shapes[0][3] == shapes[1][3]
        and all(shapes[0])
        and all(shapes[1])
        and shapes[0][2] % shapes[1][2] == 0
    )
    if not is_right:
        raise UsageError(
            f"queries, keys and values of shapes {', '.join(map(str, shapes))}",
            hint="give each as (batch, length, heads, head_dim), none of them 0, with heads of "
            "keys and values that divide the queries'",
        )
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (each.to(dtype) for each in (query, key, value))
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return query, key, value


def _refuse_order(is_causal: bool) -> None:
    if not is_causal:
        raise UsageError(
            "is_causal=False: a sparse pattern keeps keys that are not after a token",
            hint="leave `is_causal` out, or use `DilatedAttention`",
        )
