"""Block-sparse attention of packed documents, as the engine attends: held whole, or by the ranks of
a ring.

Shapes, per rank:  B 1  S tokens held  H query heads  K key/value heads  D head size
"""

import torch.distributed as dist
from torch import Tensor

from highwater.engine.attention.block_flex import attend_by_flex, obstacle
from highwater.engine.attention.block_gather import attend_by_gather, block_sparse_attention
from highwater.engine.attention.branch_attention import Sharing, branch_attention
from highwater.engine.attention.branch_kernel import branches_obstacle
from highwater.engine.attention.branches import Branch
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import MachineError
from highwater.nouns.sparse_pattern import SparsePatternConfig


def attend_sparsely(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    layout: SequenceLayout,
    pattern: SparsePatternConfig,
    scaling: float,
    ring: dist.ProcessGroup | None = None,
) -> Tensor:
    """Causal attention of each document over the keys that the pattern keeps of it, shape BSHD.

    The pattern counts from each document's start, and is that of the document's own length, so that
    it keeps the same however ranks share the row. Of padding it says nothing. Around Ulysses the
    ranks of a ring hold what those that trade heads have together. On the CPU keys are gathered,
    on a GPU it is FlexAttention, once a small proof has passed.

    Raises MachineError where that proof does not pass.
    """
    is_on_cpu = query_BHSD.device.type == "cpu"
    if ring is None:
        if not is_on_cpu:
            heads = (query_BHSD.shape[1] // key_BKSD.shape[1], query_BHSD.shape[-1])
            _refuse(obstacle(pattern, *heads, query_BHSD.dtype, query_BHSD.device))
        output_BHSD, *_ = block_sparse_attention(
            query_BHSD,
            key_BKSD,
            value_BKSD,
            pattern=pattern,
            scaling=scaling,
            document_lengths=layout.padded_lengths,
            attend_table=attend_by_gather if is_on_cpu else attend_by_flex,
        )
    else:
        # the padding at the end is a document to those that have no Ulysses around them
        behind = layout.padded_lengths[len(layout.document_lengths) :]
        lengths = (*layout.document_lengths, *behind)
        sharing = Sharing(
            layout=SequenceLayout(lengths, ring_degree=layout.ring_degree),
            branches=(Branch(),),
            pattern=pattern,
            scaling=scaling,
            group=ring,
            by_flex=not is_on_cpu,
        )
        if not is_on_cpu:
            _refuse(branches_obstacle(sharing, query_BHSD, key_BKSD.shape[1]))
        output_BHSD, _ = branch_attention(query_BHSD, key_BKSD, value_BKSD, sharing=sharing)
    return output_BHSD.transpose(1, 2)


def _refuse(reason: str | None) -> None:
    """Raise MachineError: gathered keys take other memory and time than what is predicted."""
    if reason is not None:
        raise MachineError(
            f"{reason}; block-sparse attention on GPUs is FlexAttention's",
            hint="leave `--attention` out",
        )
