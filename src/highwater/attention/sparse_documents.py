"""Block-sparse attention of packed documents, as the engine attends: held whole, or by the ranks of
a ring.

Shapes, per rank:  B 1  S tokens held  H query heads  K key/value heads  D head size
"""

import torch.distributed as dist
from torch import Tensor

from highwater.attention.block_flex import attend_by_flex, obstacle
from highwater.attention.block_gather import AttendTable, attend_by_gather, block_sparse_attention
from highwater.attention.branch_attention import Sharing, branch_attention
from highwater.attention.branches import Branch
from highwater.errors import MachineError
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
            attend_table=_kernel(query_BHSD, key_BKSD, pattern),
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


def _kernel(query_BHSD: Tensor, key_BKSD: Tensor, pattern: SparsePatternConfig) -> AttendTable:
    """FlexAttention on a GPU, once a small proof has passed; on the CPU keys are gathered.

    Raises MachineError where FlexAttention gives nothing, or something else: memory and time of
    gathered keys are not those that are predicted.
    """
    device = query_BHSD.device
    if device.type == "cpu":
        return attend_by_gather
    heads = (query_BHSD.shape[1] // key_BKSD.shape[1], query_BHSD.shape[-1])
    reason = obstacle(pattern, *heads, query_BHSD.dtype, device)
    if reason is not None:
        raise MachineError(
            f"{reason}; block-sparse attention on GPUs is FlexAttention's",
            hint="leave `--attention` out",
        )
    return attend_by_flex
