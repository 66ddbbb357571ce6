"""Layers: one decoder layer in a step of our engine, its sizes and its neighbours; what it takes of
memory is in ``layer_bytes.py``.

Attention over grouped heads, and a gated MLP or experts that are one.

In the functions:  E hidden size  V vocabulary  U ``ulysses_degree``
"""

from dataclasses import dataclass

from highwater.memory.formula.moments import (
    FamilyMoments,
    LayerMoments,
    MomentBytes,
    bytes_of,
    bytes_of_sums,
    capped_products,
    families,
    products,
)
from highwater.model.layer_kind import LayerKind, LayerRun
from highwater.model.model import ModelShape
from highwater.model.small_parameters import learned_positions
from highwater.nouns.layout import ELEMENT_BYTES, TILE_BYTES, Layout
from highwater.nouns.lora import adapter_parameters_of_layer
from highwater.nouns.settings import Settings
from highwater.nouns.trial import PROMPT_TOKENS, Device

HEAD_NORMS = ("olmo2", "olmo3", "qwen3", "qwen3_moe")
"""Model types whose layers norm queries and keys, and keep them as they were before."""
FUSED_HEADS = ("gpt_neox", "phi3")
"""Model types with one product for queries, keys and values, which is kept whole beside queries and
keys as they are rotated; what attention returns is copied for its output. Source: traces."""
OUTPUT_NORMS = ("olmo2", "olmo3")
"""Model types whose layers norm what attention and MLP return, not what they are given: that is the
residual stream itself. They rotate queries and keys in float32, by operators of PyTorch's."""
TWO_ATTENTIONS = ("diffllama",)
"""Model types whose layers attend twice, with one half of the values each time, and keep what both
return where recomputation leaves attention out."""
NUMBER_BYTES = 4
"""A number of statistics: of rows and heads that are normed, of attention, of routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's settings, and the tokens of the GPU that it takes the most of."""

    shape: ModelShape
    settings: Settings
    layout: Layout
    device: Device
    tokens: int
    trained: int
    documents: int
    """Sequences in a micro-batch, which the GPUs of a group share."""
    length_tokens: int
    """Tokens of one of them."""

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return ELEMENT_BYTES[self.device]

    @property
    def rotation_element(self) -> int:
        """Bytes of a cosine or a sine."""
        return NUMBER_BYTES if self.shape.model_type in OUTPUT_NORMS else self.element

    @property
    def table(self) -> int:
        """Parameters of the embedding, or of the head: V x E."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def positions(self) -> int:
        """Parameters of learned positions, which are embedded beside the tokens."""
        shape = self.shape
        learned = learned_positions(shape.model_type, shape.native_length_tokens)
        return learned * shape.hidden_size

    @property
    def gathers(self) -> bool:
        """Whether frozen parameters are gathered: not where each GPU has all of them."""
        return (
            self.settings.lora is None
            or self.layout.shard_degree > 1
            or self.settings.offloads_model
        )

    @property
    def is_frozen(self) -> bool:
        """Whether the model's own parameters have no gradient."""
        return self.settings.lora is not None

    def gathered(self, kind: LayerKind) -> int:
        """Parameters of a layer that are gathered for it, as many from each GPU."""
        own = kind.parameters + self.uneven(kind) if self.gathers else 0
        return own + self.adapter_parameters(kind)

    def uneven(self, kind: LayerKind) -> int:
        """Numbers beside a layer's parameters that are gathered and reduced with them, where not
        all GPUs have as many rows as the first one, experts above all: FSDP2 fills up.
        """
        if self.settings.strategy != "fsdp2":
            return 0
        return sum(each.beyond_even(self.layout.shard_degree) for each in kind.matrices)

    def trained_of(self, kind: LayerKind) -> int:
        """Parameters of a layer that have a gradient."""
        return self.adapter_parameters(kind) if self.is_frozen else kind.parameters

    def adapter_parameters(self, kind: LayerKind) -> int:
        """Parameters of a layer's adapters."""
        adapters = self.settings.adapters
        if adapters is None:
            return 0
        return adapter_parameters_of_layer(kind, self.shape.model_type, adapters)

    def layer(self, kind: LayerKind) -> "Layer":
        """One layer of a kind in this step."""
        return Layer(step=self, kind=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a kind, in a step."""

    step: Step
    kind: LayerKind

    @property
    def query(self) -> int:
        """Numbers of all query heads per token."""
        return self.kind.attention.query_size

    @property
    def key(self) -> int:
        """Numbers of all key heads per token."""
        return self.kind.attention.key_size

    @property
    def attended_key(self) -> int:
        """Numbers of all key heads per token as the attention takes them: repeated where U exceeds
        the heads.
        """
        attention = self.kind.attention
        return max(attention.kv_heads, self.step.layout.ulysses_degree) * attention.head_dim

    @property
    def before_norm(self) -> int:
        """Numbers of queries and keys that are kept as they were before their norm, or before they
        were rotated.
        """
        is_kept = self.step.shape.model_type in (*HEAD_NORMS, *FUSED_HEADS)
        return self.query + self.key if is_kept else 0

    @property
    def attentions(self) -> int:
        """Calls of attention in one layer; each returns as many numbers as the queries have."""
        return 2 if self.step.shape.model_type in TWO_ATTENTIONS else 1

    @property
    def has_output_norms(self) -> bool:
        """What is normed is what attention and MLP return."""
        return self.step.shape.model_type in OUTPUT_NORMS

    @property
    def has_tiles(self) -> bool:
        """The MLP goes in tiles, or in one, and keeps nothing but its input; experts never do."""
        settings, learned = self.step.settings, self._learned
        return (
            self.kind.mlp.plain_width > 0
            and (settings.recompute != "none" or settings.mlp_tiles is not None)
            and (learned is None or learned.has_tiles)
        )

    @property
    def tile(self) -> int:
        """Numbers of one product of a tile."""
        step = self.step
        whole, tiles = step.tokens * self.kind.mlp.plain_width, step.settings.mlp_tiles
        if tiles is not None:
            return -(-whole // tiles)
        return min(whole, TILE_BYTES[step.device] // step.element)

    @property
    def learned(self) -> LayerMoments | None:
        """What was learned of such a layer; None of a family whose layers are as they are here."""
        if self._learned is None:
            return None
        is_recomputed = self.step.settings.recompute != "none"
        found = self._learned.layer(self.step.shape.model_type, self.kind, is_recomputed)
        assert found is not None  # noqa: S101 - refuse_unknown_family
        return found

    @property
    def _learned(self) -> FamilyMoments | None:
        return families().get(self.step.shape.model_type)

    def learned_bytes(self, moment: MomentBytes) -> int:
        """Bytes of a moment. It was learned of GPUs: elsewhere numbers are as much wider, in doubt
        those too that are wide there, scores aside.
        """
        step, tile = self.step, self.tile if self.has_tiles else None
        sizes = products(self.kind, tokens=step.tokens, attended_key=self.attended_key, tile=tile)
        of_scores = capped_products(
            self.kind.attention,
            documents=step.documents,
            length_tokens=step.length_tokens,
            attended_key=self.attended_key,
            degree=step.layout.ulysses_degree,
        )
        numbers = bytes_of(moment, sizes) * step.element // ELEMENT_BYTES["cuda"]
        of_sums = bytes_of_sums(moment, self.kind, tokens=step.tokens)
        return numbers + bytes_of(moment, of_scores) + (of_sums if step.device == "cuda" else 0)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a gated MLP; of experts all of them."""
        mlp = self.kind.mlp
        return 3 * mlp.experts * self.kind.hidden_size * mlp.width

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of a weight of the MLP that is made whole for a product; 0 where all are."""
        step, mlp = self.step, self.kind.mlp
        is_packed = step.settings.lora_base == "nf4"
        return step.element * self.kind.hidden_size * mlp.width if is_packed else 0

    @property
    def trained_mlp_parameters(self) -> int:
        """Parameters that have a gradient when the MLP has gone backward, in doubt the attention's
        adapters too.
        """
        is_frozen = self.step.is_frozen
        return self.step.trained_of(self.kind) if is_frozen else self.mlp_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A layer while it goes backward, and its neighbours, which share the GPU with it."""

    kind: LayerKind
    gathered_ahead: LayerKind | None
    """The layer before it, which goes backward next; None of the first one."""
    reduced: LayerKind | None
    """The layer behind it, whose gradients are on their way to the shards; None of the last one."""
    kept_layers: int
    """Layers whose activations are still there, from the first one to itself."""
    parameters_behind: int
    """Parameters of all layers behind it, which went backward before."""


def busiest_step(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    length_tokens: int,
    device: Device,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Step:
    """A step as the GPU with the most trained tokens sees it: where several share a sequence, one
    without a prompt. ``prompt_tokens`` of a sequence, up to half of it, are not trained.
    """
    degree = layout.context_degree
    sequences = max(1, settings.sequences(length_tokens, context_degree=degree))
    tokens = -(-sequences * length_tokens // degree)
    # Of a ring none but the first rank has tokens of a prompt.
    whole = sequences // degree if layout.ring_degree == 1 else 0
    prompts = min(prompt_tokens, length_tokens // 2) * whole
    return Step(
        shape=shape,
        settings=settings,
        layout=layout,
        device=device,
        tokens=tokens,
        trained=tokens - prompts,
        documents=sequences,
        length_tokens=length_tokens,
    )


def backwards(runs: tuple[LayerRun, ...]) -> tuple[Backward, ...]:
    """Layers going backward, the last one at the end: of each run those at its ends.

    Between them each layer keeps as much more, and has as much less behind it, as the one before:
    the most of both together is at an end.
    """
    found: list[Backward] = []
    before: LayerKind | None = None
    passed = 0
    left = sum(run.count * run.kind.parameters for run in runs)
    for run, behind in zip(runs, (*runs[1:], None), strict=True):
        last = run.count - 1
        # The first and the last have other neighbours than those between.
        for layer in sorted({0, min(1, last), max(0, last - 1), last}):
            backward = Backward(
                kind=run.kind,
                gathered_ahead=run.kind if layer else before,
                reduced=run.kind if layer < last else behind and behind.kind,
                kept_layers=passed + layer + 1,
                parameters_behind=left - (layer + 1) * run.kind.parameters,
            )
            found.append(backward)
        before, passed = run.kind, passed + run.count
        left -= run.count * run.kind.parameters
    return tuple(found)
