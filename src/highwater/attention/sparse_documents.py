"""Block-sparse attention of packed documents, as the engine attends: held whole, or by the ranks of
a ring.

Shapes, per rank:  B 1  S tokens held  H query heads  K key/value heads  D head size
"""

import torch.distributed as dist
from torch import Tensor

from highwater.attention.block_gather import block_sparse_attention
from highwater.attention.branch_attention import Sharing, branch_attention
from highwater.attention.branches import Branch
from highwater.parallel.sequence_layout import SequenceLayout
from highwater.spec.sparse_pattern import SparsePatternConfig


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
    ranks of a ring hold what those that trade heads have together.
    """
    if ring is None:
        output_BHSD, *_ = block_sparse_attention(
            query_BHSD,
            key_BKSD,
            value_BKSD,
            pattern=pattern,
            scaling=scaling,
            document_lengths=layout.padded_lengths,
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
        )
        output_BHSD, _ = branch_attention(query_BHSD, key_BKSD, value_BKSD, sharing=sharing)
    return output_BHSD.transpose(1, 2)
