"""Layers: what one decoder layer of our engine keeps for its backward pass, and what it takes while it goes backward.

Attention over grouped heads, and a gated MLP or experts that are one. What is alive when is what traces have at their peaks.

In the functions:  T tokens of a GPU's micro-batch  N trained ones of them  E hidden size  V vocabulary  F intermediate size
K experts a token goes to  X experts  U ``ulysses_degree``
"""

from collections.abc import Mapping
from dataclasses import dataclass

from highwater.spec.layout import Layout
from highwater.spec.model import ModelShape
from highwater.spec.settings import Settings
from highwater.spec.trial import PROMPT_TOKENS, Device
from highwater.units import MIB

HEAD_NORMS = ("olmo2", "qwen3", "qwen3_moe")
"""Model types whose layers norm queries and keys, and keep them as they were before."""
OUTPUT_NORMS = ("olmo2",)
"""Those that norm what attention and MLP return, not what they are given: that is the residual stream itself. They rotate queries
and keys in float32, by operators of PyTorch's."""
TILE_BYTES: Mapping[Device, int] = {"cuda": 128 * MIB, "cpu": MIB}
"""One of the three products of a tile where an MLP goes in tiles. Source: engine/gated_mlp.py."""
ELEMENT_BYTES: Mapping[Device, int] = {"cuda": 2, "cpu": 4}
"""Activations, logits and gathered weights: bfloat16 on a GPU, float32 on the CPU."""
_NUMBER_BYTES = 4
"""Statistics: of rows and heads that are normed, of attention, of routers."""
_ROUTED_BYTES = 3 * 8 + 4 + 2
"""Per token and expert that it goes to: which one, its place among the sorted and whose row is there, in 8 bytes each; its weight,
in float32 and sorted."""
_MOMENTS = ((0, 6, 1), (1, 3, 2), (2, 1, 3))
"""Of an MLP in one piece, what is alive at once: so many of T x E and of T x F, and gradients of so many of its three weights.

The products that are kept for it (gate, up, their activation and the product) and the gradients of activation, product and up;
that of gate, while up's is done; that of gate alone. Source: the order in which autograd comes to them, in traces.
"""
_MOMENTS_OF_EXPERTS = ((5, 4, 0), (2, 5, 1), (1, 6, 1), (2, 2, 3))
"""The same of experts, of T K x E and T K x F.

All that is kept, of T K x E a token's copies and what the experts gave, and three gradients of that; all but what they gave, the
gradients of it, of the product and of the down weights; three gradients of T K x F as above; those of the copies, and of gate and
up, which are one weight.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's settings, and the tokens of the GPU that it takes the most of."""

    shape: ModelShape
    settings: Settings
    layout: Layout
    device: Device
    tokens: int
    trained: int

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return ELEMENT_BYTES[self.device]

    @property
    def rotation_element(self) -> int:
        """Bytes of a cosine or a sine."""
        return _NUMBER_BYTES if self.shape.model_type in OUTPUT_NORMS else self.element

    @property
    def table(self) -> int:
        """Parameters of the embedding, or of the head: V x E."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def query(self) -> int:
        """Numbers of all query heads per token."""
        return self.shape.query_heads * self.shape.head_dim

    @property
    def key(self) -> int:
        """Numbers of all key heads per token."""
        return self.shape.kv_heads * self.shape.head_dim

    @property
    def attended_key(self) -> int:
        """The same as the attention takes them: repeated where U exceeds the heads."""
        return max(self.shape.kv_heads, self.layout.ulysses_degree) * self.shape.head_dim

    @property
    def before_norm(self) -> int:
        """Numbers of queries and keys that are kept as they were before their norm."""
        return self.query + self.key if self.shape.model_type in HEAD_NORMS else 0

    @property
    def has_tiles(self) -> bool:
        """The MLP goes in tiles, or in one, and keeps nothing but its input; experts never do."""
        return self.shape.experts == 1 and (self.settings.recompute != "none" or self.settings.mlp_tiles is not None)


def busiest_step(shape: ModelShape, settings: Settings, layout: Layout, length_tokens: int, device: Device) -> Step:
    """Of the GPU with the most trained tokens: where several share a sequence, one without a prompt."""
    degree = layout.context_degree
    sequences = max(1, settings.sequences(length_tokens, context_degree=degree))
    tokens = -(-sequences * length_tokens // degree)
    prompts = min(PROMPT_TOKENS, length_tokens // 2) * (sequences // degree)
    return Step(shape=shape, settings=settings, layout=layout, device=device, tokens=tokens, trained=tokens - prompts)


def layer_parameters(shape: ModelShape) -> int:
    """Of one layer."""
    outside = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2) + shape.hidden_size
    return (shape.parameters - outside) // shape.layers


def kept_bytes(step: Step) -> int:
    """Per token: its input (E), and what its attention returns if that is kept; without recompute all that its backward pass reads.

    Source: engine/recompute.py.
    """
    if step.settings.recompute != "none":
        attention = 0 if step.settings.recompute == "layer" else step.element * step.query + 4 * step.shape.query_heads
        return step.element * step.shape.hidden_size + attention
    shape, hidden = step.shape, step.shape.hidden_size
    mlp = 0 if step.has_tiles else 4 * shape.intermediate_size
    experts = shape.experts_per_token * (mlp + 2 * hidden) if shape.experts > 1 else mlp
    return _attention_kept(step) + _routing(step) + step.element * (hidden + experts)


def working_set_bytes(step: Step) -> int:
    """Its attention, after its MLP's gradients, its MLP, or its weights on their way from the host, whatever takes more; less what
    is kept of it besides its input.
    """
    shape, kept = step.shape, kept_bytes(step) - step.element * step.shape.hidden_size
    gradients = step.element * (_mlp_parameters(shape) + shape.hidden_size * step.query)
    attention = step.tokens * max(0, _attention_bytes(step) - kept) + gradients
    if shape.model_type in OUTPUT_NORMS and step.settings.recompute != "none":
        attention = max(attention, step.tokens * _rotation_bytes(step))
    attention = max(attention, _fetching_bytes(step))
    # Beside the MLP: what the attention keeps, and the gradient of what the layer returns.
    beside = _attention_kept(step) + _routing(step) + step.element * shape.hidden_size - kept
    if not step.has_tiles:
        return max(attention, *_mlp_moments(step, beside))
    whole, tiles = step.element * step.tokens * shape.intermediate_size, step.settings.mlp_tiles
    tile = min(whole, TILE_BYTES[step.device]) if tiles is None else -(-whole // tiles)
    # The gradient of what the MLP is given; a tile's three products; the gradients of the weights, which are summed in float32.
    beside += step.element * shape.hidden_size
    return max(attention, step.tokens * max(0, beside) + 3 * tile + 4 * _mlp_parameters(shape))


def _fetching_bytes(step: Step) -> int:
    """Besides the gathered layer, where one GPU alone fetches its weights from the host: the gradient of what the layer returns; of
    the weight before the last a copy in bfloat16, the last one in float32 and in bfloat16, and its place still to be made.

    Experts have two weights, of gate and up, and down; other MLPs three. Among several GPUs each fetches a share.
    """
    settings = step.settings
    if step.device == "cpu" or not settings.offload or settings.strategy != "fsdp2" or step.layout.shard_degree > 1:
        return 0
    weight = _mlp_parameters(step.shape) // 3
    before = 2 * weight if step.shape.experts > 1 else weight
    return step.element * (step.tokens * step.shape.hidden_size + before) + _NUMBER_BYTES * weight


def _mlp_moments(step: Step, beside: int) -> tuple[int, ...]:
    """Bytes of an MLP in one piece going backward, at each moment that may be the peak, with so much per token beside it."""
    shape = step.shape
    moments = _MOMENTS_OF_EXPERTS if shape.experts > 1 else _MOMENTS
    per_token = (
        shape.experts_per_token * (hidden * shape.hidden_size + wide * shape.intermediate_size) for hidden, wide, _ in moments
    )
    weights = (step.element * count * _mlp_parameters(shape) // 3 for _, _, count in moments)
    return tuple(
        step.tokens * max(0, beside + step.element * numbers) + size for numbers, size in zip(per_token, weights, strict=True)
    )


def _attention_bytes(step: Step) -> int:
    """Per token, while the attention goes backward, with what its kernel takes for itself.

    The input, where it is normed, and the residual's gradient; q and k before their norm, where they have one; q, k, v as the
    attention takes them; its output and its gradient; the gradients of q, k, v; inside cuDNN's kernel q's gradient in float32, and,
    where query heads share them, k's and v's for every query head; and three float32 numbers a head.
    Source: docs/results/layer: the tensors of three models within 2 %, the kernel's part from Qwen3-0.6B on an H200.
    """
    query, attended = step.query, step.attended_key
    stream = step.shape.hidden_size * (1 if step.shape.model_type in OUTPUT_NORMS else 2)
    tensors = step.element * (stream + step.before_norm + 2 * (query + 2 * attended) + 2 * query)
    for_every_head = 2 * step.element * query if attended != query else 0
    return tensors + 4 * query + for_every_head + 3 * _NUMBER_BYTES * step.shape.query_heads


def _rotation_bytes(step: Step) -> int:
    """Per token, while a layer that norms outputs is recomputed: the residual's gradient, q and k before and after their norm, v,
    and in float32 two products and their sum, of q, or of k beside the sum of q's.
    """
    query, key = step.query, step.key
    tensors = step.shape.hidden_size + 2 * (query + key) + key
    return step.element * tensors + _NUMBER_BYTES * max(3 * query, query + 3 * key)


def _attention_kept(step: Step) -> int:
    """Per token: what the attention keeps, with the residual stream after it and the MLP's input: q, k, v as it takes them, its
    output and, of Ulysses, a copy of it in this GPU's positions; numbers of each row and head.

    Where outputs are normed, these and the stream are three of T x E, too.
    """
    shape, query = step.shape, step.query
    copy = query if step.layout.ulysses_degree > 1 else 0
    tensors = 3 * shape.hidden_size + step.before_norm + (query + 2 * step.attended_key) + query + copy
    normed_heads = shape.query_heads + shape.kv_heads if step.before_norm else 0
    return step.element * tensors + _NUMBER_BYTES * (2 + shape.query_heads + normed_heads)


def _routing(step: Step) -> int:
    """Per token: what routers keep of all experts, once for the products and once for their own loss, if they have one, and of the
    chosen ones.
    """
    shape = step.shape
    if shape.experts == 1:
        return 0
    return (1 + shape.balanced_experts) * _NUMBER_BYTES * shape.experts + _ROUTED_BYTES * shape.experts_per_token


def _mlp_parameters(shape: ModelShape) -> int:
    """Of a layer; of experts all of them."""
    return 3 * shape.experts * shape.hidden_size * shape.intermediate_size
