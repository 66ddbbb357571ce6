"""Cache retention: what the caching allocator keeps reserved between its uses, until memory runs
short.

FSDP gathers and reduces on streams of its own, and a block that was cut for one stream serves no
other. On the main stream, a block serves no request longer than itself. The largest unit, the root
(embedding and head), decides what is kept so: it stays reserved after its one use a micro-batch,
counts in what the driver reports, and is given back before the allocator gives up. So it decides no
capacity. Source: the streams and free blocks in traces of the trials in docs/results/find, and the
bytes that those trials reserved (docs/results/predict).
"""

from highwater.model.model import ModelShape
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings

_WEIGHT, _GRADIENT, _MASTER = 2, 4, 4
"""Bytes of an element: gathered in bfloat16, reduced in float32, on the host in float32 where it is
trained."""
_HOLE_FROM = 7 / 3
"""Activations that leave a hole for the root's gradients in float32 are at least this many times
as large as those.

The gradients themselves are 1; the root as it was gathered and its gradients in bfloat16, which cut
what activations left into holes, half of that each; the rest is what lies between. Source: traces
in docs/results/lab/breakdown.json; of 8B there is a new block at 49,152 tokens on 4 GPUs and none
at 65,536, on 8 GPUs at 65,536 and none at 131,072.
"""


def cached_bytes(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    *,
    passing_bytes: int,
    late_bytes: int = 0,
) -> int:
    """Bytes that the allocator of one GPU keeps between their uses, once every unit has passed.

    ``passing_bytes`` is the most that is alive besides the states. ``late_bytes`` are gradients on
    a stream of their own that come where activations go, as far as both are not alive at once: none
    of them lies in what the activations left.
    """
    if settings.strategy == "fsdp":
        return (
            _lent(shape, layout) + _reduced_by_fsdp1(shape, settings, layout)
        ) * settings.trained_models + late_bytes
    return _of_other_streams(shape, settings, layout, late_bytes) + _too_long_for_a_hole(
        shape, settings, layout, passing_bytes
    )


def _too_long_for_a_hole(
    shape: ModelShape, settings: Settings, layout: Layout, passing_bytes: int
) -> int:
    """Bytes of a block that is taken, and kept, for all gradients of the root in float32 before
    they are reduced: none where a hole that activations left is long enough for it, which it is not
    where sequences are short.
    """
    whole = _GRADIENT * _root(shape, has_head=not settings.traits.gives_scalars)
    has_gradients = layout.shard_degree > 1 and settings.lora is None
    return whole if has_gradients and passing_bytes < _HOLE_FROM * whole else 0


def _of_other_streams(
    shape: ModelShape, settings: Settings, layout: Layout, late_bytes: int
) -> int:
    """Bytes that FSDP2 keeps on the streams on which it gathers and reduces: of the sums those of
    the root, which are among the gradients that come late; of adapters it has none.
    """
    policy = _root(shape, has_head=not settings.traits.gives_scalars)
    trained = policy + (_root(shape, has_head=False) if settings.trained_models > 1 else 0)
    gathered = trained + (
        policy if settings.has_second_model else 0
    )  # the reference is another model under FSDP2
    summed = trained if settings.lora is None else 0
    return (
        max(_GRADIENT * summed // layout.shard_degree, late_bytes)
        + _gathering(gathered, layout)
        + _from_host(shape, settings, layout)
    )


def _from_host(shape: ModelShape, settings: Settings, layout: Layout) -> int:
    """Bytes of this GPU's shard of embedding or head in float32, as it comes from the host. Both
    pass through one block, one after another; what is gathered of them finds no room there.

    One GPU takes it on the main stream, where activations take its place; a frozen reference comes
    in bfloat16. Source: the gathering stream in traces of the trials long-8b-2-offload and
    long-8b-4-offload, 1.16 and 0.58 GiB.
    """
    if not settings.offloads_model or layout.shard_degree == 1:
        return 0
    size = _MASTER if settings.lora is None else _WEIGHT
    return size * _root(shape, has_head=False) * settings.trained_models // layout.shard_degree


def _gathering(parameters: int, layout: Layout) -> int:
    """Bytes of a shard on its way in and of what is gathered of it; one GPU gathers nothing."""
    degree = layout.shard_degree
    return 0 if degree == 1 else _WEIGHT * (parameters + parameters // degree)


def _lent(shape: ModelShape, layout: Layout) -> int:
    """Bytes of units that FSDP1 lends to another stream: alone on a GPU its host runs ahead by a
    whole pass, else it waits after two units, the root and the largest layer.
    """
    if layout.shard_degree == 1:
        return _WEIGHT * shape.parameters
    largest_layer = max(run.kind.parameters for run in shape.runs)
    of_the_last_norm = shape.hidden_size // shape.layers  # which is gathered with them, in parts
    return _WEIGHT * (_root(shape, has_head=True) + largest_layer + of_the_last_norm)


def _reduced_by_fsdp1(shape: ModelShape, settings: Settings, layout: Layout) -> int:
    """Bytes of the root's gradients in float32 and of this GPU's share of their sum, which is a
    state where states are offloaded.
    """
    degree, root = layout.shard_degree, _root(shape, has_head=not settings.traits.gives_scalars)
    if degree == 1:
        return 0
    return _GRADIENT * (root if settings.offloads_model else root + root // degree)


def _root(shape: ModelShape, *, has_head: bool) -> int:
    """Parameters of embedding and head, or of the embedding where they are tied or a number stands
    in the vocabulary's place.
    """
    return (
        shape.vocab_size * shape.hidden_size * (2 if has_head and not shape.tied_embeddings else 1)
    )
