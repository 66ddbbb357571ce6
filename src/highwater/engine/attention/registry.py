"""Registry: register a model's attention with transformers. It is dense over whole documents or
within each layer's window; ranks share it by heads, by a ring, or by heads around a ring.

Shapes:  B 1  S packed tokens, or this rank's share of them  H query heads  K key/value heads  D
head size

Block-sparse attention is registered for any model, as ``highwater_block_sparse``. It separates
documents by ``cu_seq_lens_q``, or by positions that restart, as transformers' own data collators
and its flash attention do; each attends only to itself, and its pattern counts from its own start.
Features that an attention does not compute raise an error that names them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from highwater.engine.attention.block_flex import (
    attend_by_flex,
    attend_table_of,
    kernel_of,
    obstacle,
)
from highwater.engine.attention.block_gather import attend_by_gather, block_sparse_attention
from highwater.engine.attention.branch_attention import Sharing, branch_attention
from highwater.engine.attention.branch_kernel import branches_obstacle
from highwater.engine.attention.branches import Branch
from highwater.engine.attention.dense import attend
from highwater.engine.attention.mixed_lengths import attend_mixed
from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
from highwater.engine.attention.ring import Ring, attend_in_ring
from highwater.engine.attention.wide_block import is_wide
from highwater.engine.parallel.collectives import Attend, attend_sharded
from highwater.engine.parallel.mesh import ALONE, SequenceGroups
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import MachineError, ModelError
from highwater.model.layer_kind import slides
from highwater.nouns.cells import unringed
from highwater.nouns.hardware import Kernel
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
    """Causal attention of each document over the keys that the pattern keeps, shape BSHD.

    The pattern counts from each document's start and depends only on that document's length, so it
    is the same however ranks share the row. The output at padding is unspecified. With Ulysses in a
    ring, ring ranks hold the tokens of all ranks that trade heads. The CPU gathers keys; a GPU runs
    FlexAttention after a small proof has passed.

    Raises MachineError if that proof does not pass.
    """
    is_on_cpu = query_BHSD.device.type == "cpu"
    if ring is None:
        if not is_on_cpu:
            heads = (query_BHSD.shape[1] // key_BKSD.shape[1], query_BHSD.shape[-1])
            _refuse(obstacle(pattern, *heads, query_BHSD.dtype, query_BHSD.device))
        output_BHSD, *_ = block_sparse_attention(
            *(query_BHSD, key_BKSD, value_BKSD),
            pattern=pattern,
            scaling=scaling,
            document_lengths=layout.padded_lengths,
            attend_table=attend_by_gather if is_on_cpu else attend_by_flex,
        )
    else:
        # without Ulysses around the ring, the padding at the end is a document of its own
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
    """Raise MachineError for ``reason``: gathered keys would take more memory and time."""
    if reason is not None:
        raise MachineError(
            f"{reason}; block-sparse attention on GPUs is FlexAttention's",
            hint="leave `--attention` out",
        )


_numbers = count(1)
"""Numbers that make registered names unique: two models in one process keep their calls apart."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Our attention, by its name in transformers, and the modules that called it so far."""

    name: str
    """The value of ``attn_implementation`` to build the model with."""
    callers: set[nn.Module]
    """Attention modules that have called it: one for each layer.

    If there are fewer, the model also mixes tokens in some other way."""
    shared: SequenceGroups = ALONE
    """Ranks that share each sequence."""


def register(
    kernel: Kernel,
    *,
    shared: SequenceGroups = ALONE,
    depth: int | None = None,
    sparse: SparsePatternConfig | None = None,
) -> Attention:
    """Register the attention with transformers for this process.

    ``shared`` are the ranks that share each sequence. With a ``depth`` only the last ``depth``
    layers attend over whole documents, the others in pieces. ``sparse``: pattern of the keys that
    every layer keeps; None: all keys.
    """
    assert depth is None or sparse is None, "sparse attention is not cut into pieces"
    callers: set[nn.Module] = set()
    windows: dict[nn.Module, int | None] = {}

    def interface(
        module: nn.Module,
        query_BHSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sequence_layout: SequenceLayout | None = None,
        asks_keeper: bool = False,
        **features: Any,
    ) -> tuple[Tensor, None]:
        callers.add(module)
        if sequence_layout is None:
            raise _unsupported(module, "no word of the documents, which would see each other")
        if attention_mask is not None:
            raise _unsupported(module, f"a mask of its own, of shape {tuple(attention_mask.shape)}")
        _refuse_features(module, features, _unsupported)
        if module not in windows:
            windows[module] = _window_of(module, features)
        pattern = Pattern(
            scaling=query_BHSD.shape[-1] ** -0.5 if scaling is None else scaling,
            window_tokens=windows[module],
            soft_cap=features.get("softcap"),
            is_wide=is_wide(query_BHSD),
            sinks_H=features.get("s_aux"),
        )
        longest = max(sequence_layout.document_lengths)
        if sparse is not None:
            if not pattern.is_dense_up_to(longest):
                what = f"heads of {query_BHSD.shape[-1]} numbers" if pattern.is_wide else "sinks"
                raise _unsupported(module, f"a window, or {what}, beside a sparse pattern")
            ours: Attend = partial(
                attend_sparsely,
                layout=sequence_layout,
                ring=shared.ring,
                pattern=sparse,
                scaling=pattern.scaling,
            )
        else:
            if shared.ring is not None:
                why = unringed(
                    longest,
                    caps_scores=pattern.soft_cap is not None,
                    widest_head=pattern.is_wide * query_BHSD.shape[-1],
                    window_tokens=pattern.window_tokens,
                )
                if why is not None:
                    hint = "use `--ulysses` in the place of `--ring`"
                    raise ModelError(f"{_family(module)}: {why}", hint=hint)
            in_pieces = depth is not None and _layers_from_the_end(module) > depth
            how = {"kernel": kernel, "in_pieces": in_pieces}
            ours = _attend(sequence_layout, shared, pattern=pattern, asks_keeper=asks_keeper, **how)
        if shared.ulysses is not None:
            ours = partial(attend_sharded, group=shared.ulysses, attend=ours)
        return ours(query_BHSD, key_BKSD, value_BKSD), None

    name = f"highwater_{next(_numbers)}"
    AttentionInterface.register(name, interface)
    return Attention(name, callers, shared)


def _attend(
    layout: SequenceLayout,
    shared: SequenceGroups,
    *,
    pattern: Pattern,
    asks_keeper: bool,
    **how: Any,
) -> Attend:
    """Return the attention of this rank's heads over its share of each document: BHSD to BSHD.

    With ``asks_keeper`` it is never PyTorch's own function, but one that calls ``attended``.
    """
    ring, ulysses = shared.ring, shared.ulysses
    if ulysses is not None:
        pattern = pattern.of_heads(dist.get_rank(ulysses), dist.get_world_size(ulysses))
    if ring is not None:
        held = tuple(length // layout.ring_degree for length in layout.padded_lengths)
        of_calls = Ring(held_lengths=held, scaling=pattern.scaling, group=ring, **how)
        return partial(attend_in_ring, ring=of_calls, sinks_H=pattern.sinks_H)
    if pattern.is_dense_up_to(max(layout.document_lengths)):
        # padding joins the last document, so that a row of one document stays one call
        *others, last = layout.document_lengths
        lengths = (*others, last + sum(layout.padded_lengths) - layout.tokens)
        is_whole = len(set(lengths)) == 1
        if not asks_keeper or not is_whole:
            dense = attend_mixed if asks_keeper else attend
            return partial(dense, document_lengths=lengths, scaling=pattern.scaling, **how)
    else:
        lengths = layout.padded_lengths
    documents = Documents(lengths=lengths, pattern=pattern, **how)
    return lambda *tensors: attend_in_pattern(*tensors, documents=documents).output_BSHD


def _window_of(module: nn.Module, features: dict[str, Any]) -> int | None:
    """Return the number of tokens that a token of this layer reads; None: its whole document.

    The number is that which the family passes to attention functions; for a family that puts its
    window only into the mask, it follows from this layer's type in the config.
    """
    if "sliding_window" in features:
        return features["sliding_window"] or None
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    window: int | None = getattr(config, "sliding_window", None) or None
    if config is None or window is None:
        return None
    if not isinstance(layer, int):
        raise _unsupported(module, f"a sliding window of {window} tokens, and a layer of no number")
    return window if slides(config.to_dict(), layer) else None


def _layers_from_the_end(module: nn.Module) -> int:
    """Return the position of the module's layer counted from the end; the last is 1."""
    index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
    if not isinstance(index, int) or config is None:
        raise ModelError(
            f"{type(module).__name__} does not know its layer, so that none can be the one with "
            f"the whole attention",
            hint="leave `--attention-depth` and `--proof` out",
        )
    return config.num_hidden_layers - index


def _refuse_features(
    module: nn.Module,
    features: dict[str, Any],
    refusal: Callable[[nn.Module, str], ModelError],
    *names: str,
) -> None:
    """Raise ``refusal`` for a feature that no attention here computes, or any of ``names``."""
    for name in (*names, "position_bias", "head_mask"):
        if features.get(name) is not None:
            raise refusal(module, name)
    if features.get("dropout"):
        raise refusal(module, "dropout")
    if features.get("is_causal") is False:
        raise refusal(module, "no causal order")


def _unsupported(module: nn.Module, feature: str) -> ModelError:
    return ModelError(
        f"{_family(module)} attends with {feature}, which is not supported",
        hint="use a family of full attention in every layer, for example Qwen3, Llama or Qwen3-MoE",
    )


def _family(module: nn.Module) -> str:
    # the config names the family even if one of our classes has replaced the module
    return getattr(getattr(module, "config", None), "model_type", type(module).__name__)


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
            raise _uncomputed(module, f"a mask of its own, of shape {tuple(attention_mask.shape)}")
        if query_BHSD.shape[2] != key_BKSD.shape[2]:
            raise _uncomputed(module, "a cache of earlier keys")
        documents = _document_lengths(module, query_BHSD, features)
        # a family that does not pass its window on has put it into the mask; 0 means no window
        own = getattr(getattr(module, "config", None), "sliding_window", None) or None
        window = features.get("sliding_window", own)
        if window is not None and window < (longest := max(map(max, documents))):
            what = f"a sliding window of {window} tokens, too few for documents of {longest}"
            raise _uncomputed(module, what)
        _refuse_features(module, features, _uncomputed, "softcap", "s_aux")
        if getattr(module, "is_causal", True) is False:
            raise _uncomputed(module, "no causal order")
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
    """Build no mask; raises ModelError for padding, which would need a mask."""
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
            raise _uncomputed(module, f"cu_seq_lens_q of {batch} sequences")
        keys = features.get("cu_seq_lens_k")
        if keys is not None and not torch.equal(keys, cumulative):
            raise _uncomputed(module, "cu_seq_lens_k that are not those of the queries")
        lengths = tuple(cumulative.diff().tolist())
        if sum(lengths) != length or min(lengths) < 1:
            what = f"documents of {lengths} tokens in a sequence of {length} tokens"
            raise _uncomputed(module, what)
        return [lengths]
    if positions is None:
        return [(length,)]
    if positions.ndim != 2 or positions.shape[1] != length:
        raise _uncomputed(module, f"position_ids of shape {tuple(positions.shape)}")
    begins = positions[:, 1:] != positions[:, :-1] + 1
    documents = [_lengths(row) for row in begins.cpu()]
    return documents[:1] if len(set(documents)) == 1 else documents


def _lengths(begins: Tensor) -> tuple[int, ...]:
    """Count each document's tokens, from where documents begin (for all tokens but the first)."""
    first = [0, *(begins.nonzero()[:, 0] + 1).tolist(), len(begins) + 1]
    return tuple(stop - start for start, stop in pairwise(first))


def _uncomputed(module: nn.Module, feature: str) -> ModelError:
    return ModelError(
        f"{_family(module)} attends with {feature}, which block-sparse attention does not compute",
        hint="use a family of full attention in every layer, for example Qwen3 or Llama, and train "
        "with `use_cache=False`",
    )
