"""Block-sparse attention for transformers, registered as ``highwater_block_sparse``.

Documents are told apart by ``cu_seq_lens_q``, or by positions that start again, as transformers'
own data collators and its flash attention do; each attends only to itself, and its pattern counts
from its own start. Unsupported features (padding, a cache of earlier keys, a window, a soft cap,
sinks, dropout) are refused by name.

Shapes:  B sequences  S tokens  H query heads  K key/value heads  D head size
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from highwater.engine.attention.block_flex import attend_table_of, kernel_of
from highwater.engine.attention.block_gather import block_sparse_attention
from highwater.errors import ModelError
from highwater.nouns.sparse_pattern import SparsePatternConfig

NAME = "highwater_block_sparse"


def register_block_sparse(
    sparse_config: SparsePatternConfig | None = None, *, name: str = NAME
) -> str:
    """Register the attention with transformers, for this process; returns its name.

    Build a model with it: ``AutoModelForCausalLM.from_pretrained(model,
    attn_implementation=highwater.register_block_sparse(config))``. Registering another pattern
    under the same name changes every model of that name; give ``name`` to keep two apart.
    """
    pattern = SparsePatternConfig() if sparse_config is None else sparse_config

    def interface(
        module: nn.Module,
        query_BHSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        **features: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise _unsupported(module, f"a mask of its own, of shape {tuple(attention_mask.shape)}")
        if query_BHSD.shape[2] != key_BKSD.shape[2]:
            raise _unsupported(module, "a cache of earlier keys")
        documents = _document_lengths(module, query_BHSD, features)
        _refuse_features(module, features, longest=max(map(max, documents)))
        scale = query_BHSD.shape[-1] ** -0.5 if scaling is None else scaling
        kernel, rows = kernel_of(module, "auto"), [(query_BHSD, key_BKSD, value_BKSD)]
        table = attend_table_of(kernel, pattern, query_BHSD, key_BKSD.shape[1])
        attend = partial(block_sparse_attention, pattern=pattern, scaling=scale, attend_table=table)
        if len(documents) > 1:
            rows = list(zip(*(tensor.split(1) for tensor in rows[0]), strict=True))
        outputs = [
            attend(*row, document_lengths=lengths).output_BHSD
            for row, lengths in zip(rows, documents, strict=True)
        ]
        return torch.cat(outputs).transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, interface)
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _no_mask(*arguments: Any, attention_mask: Tensor | None = None, **others: Any) -> None:
    """Build no mask; raises ModelError for padding, which a mask would have to hide."""
    del arguments, others
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ModelError(
            "a batch has padding, which block-sparse attention does not leave out",
            hint="pack documents into one row without padding, with `position_ids` that begin anew",
        )


def _document_lengths(
    module: nn.Module, query_BHSD: Tensor, features: dict[str, Any]
) -> list[tuple[int, ...]]:
    """Return lengths of each sequence's documents; one entry if all sequences have the same."""
    batch, length = query_BHSD.shape[0], query_BHSD.shape[2]
    cumulative, positions = features.get("cu_seq_lens_q"), features.get("position_ids")
    if cumulative is not None:
        if batch != 1:
            raise _unsupported(module, f"cu_seq_lens_q of {batch} sequences")
        keys = features.get("cu_seq_lens_k")
        if keys is not None and not torch.equal(keys, cumulative):
            raise _unsupported(module, "cu_seq_lens_k that are not those of the queries")
        lengths = tuple(cumulative.diff().tolist())
        if sum(lengths) != length or min(lengths) < 1:
            what = f"documents of {lengths} tokens in a sequence of {length} tokens"
            raise _unsupported(module, what)
        return [lengths]
    if positions is None:
        return [(length,)]
    if positions.ndim != 2 or positions.shape[1] != length:
        raise _unsupported(module, f"position_ids of shape {tuple(positions.shape)}")
    begins = positions[:, 1:] != positions[:, :-1] + 1
    documents = [_lengths(row) for row in begins.cpu()]
    return documents[:1] if len(set(documents)) == 1 else documents


def _lengths(begins: Tensor) -> tuple[int, ...]:
    """Count each document's tokens, from where documents begin (for all tokens but the first)."""
    first = [0, *(begins.nonzero()[:, 0] + 1).tolist(), len(begins) + 1]
    return tuple(stop - start for start, stop in pairwise(first))


def _refuse_features(module: nn.Module, features: dict[str, Any], *, longest: int) -> None:
    """Raise ModelError for a feature that this attention does not compute."""
    # a family that does not pass its window on has put it into the mask; 0 means no window
    own = getattr(getattr(module, "config", None), "sliding_window", None) or None
    window = features.get("sliding_window", own)
    if window is not None and window < longest:
        what = f"a sliding window of {window} tokens, too few for documents of {longest}"
        raise _unsupported(module, what)
    for feature in ("softcap", "s_aux", "position_bias", "head_mask"):
        if features.get(feature) is not None:
            raise _unsupported(module, feature)
    if features.get("dropout"):
        raise _unsupported(module, "dropout")
    if features.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _unsupported(module, "no causal order")


def _unsupported(module: nn.Module, feature: str) -> ModelError:
    family = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return ModelError(
        f"{family} attends with {feature}, which block-sparse attention does not compute",
        hint="use a family of full attention in every layer, for example Qwen3 or Llama, and train "
        "with `use_cache=False`",
    )
