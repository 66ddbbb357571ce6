"""Streams: what the caching allocator keeps free for streams other than the main one, until memory runs short.

FSDP gathers and reduces on streams of its own, and a block that was cut for one stream serves no other. The largest unit, the root
(embedding and head), decides what they keep: it stays reserved after its one use a micro-batch, counts in what the driver reports,
and is given back before the allocator gives up. So it decides no capacity. Not in it: where sequences are so short that no free
block holds all gradients of the root in float32, a new one for them stays, too (docs/results/predict, intervals).
Source: the streams in traces of the trials in docs/results/find, and the bytes that those trials reserved (docs/results/predict).
"""

from highwater.spec.layout import Layout
from highwater.spec.model import ModelShape
from highwater.spec.settings import Settings

_WEIGHT, _GRADIENT = 2, 4
"""Bytes of an element: gathered in bfloat16, reduced in float32."""


def cached_bytes(shape: ModelShape, settings: Settings, layout: Layout) -> int:
    """Of one GPU, once every unit has passed."""
    if settings.strategy == "fsdp":
        return _lent(shape, layout) * settings.trained_models
    policy = _root(shape, has_head=settings.objective != "rw")
    trained = policy + (_root(shape, has_head=False) if settings.trained_models > 1 else 0)
    gathered = trained + (policy if settings.objective == "grpo" else 0)  # the reference is another model under FSDP2
    return _GRADIENT * trained // layout.shard_degree + _gathering(gathered, layout)


def _gathering(parameters: int, layout: Layout) -> int:
    """A shard on its way in and what is gathered of it; one GPU gathers nothing."""
    degree = layout.shard_degree
    return 0 if degree == 1 else _WEIGHT * (parameters + parameters // degree)


def _lent(shape: ModelShape, layout: Layout) -> int:
    """FSDP1 lends units to another stream: alone on a GPU its host runs ahead by a whole pass, else it waits after two units."""
    if layout.shard_degree == 1:
        return _WEIGHT * shape.parameters
    root = _root(shape, has_head=True)
    return _WEIGHT * (root + (shape.parameters - root) // shape.layers)


def _root(shape: ModelShape, *, has_head: bool) -> int:
    """Parameters of embedding and head, or of the embedding where they are tied or a number stands in the vocabulary's place."""
    return shape.vocab_size * shape.hidden_size * (2 if has_head and not shape.tied_embeddings else 1)
