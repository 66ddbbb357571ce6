"""ModelShape and Model: sizes in a Hugging Face ``config.json``, read without transformers."""

from functools import lru_cache
from typing import Any

import msgspec

from highwater.errors import ModelError
from highwater.model.families import EXPERTS_PER_TOKEN, family_row
from highwater.model.layer_kind import (
    AttentionKind,
    LayerKind,
    LayerRun,
    Matrices,
    MlpKind,
    runs_of,
    small_parameters,
)
from highwater.model.model_config import (
    TEXT_OF,
    ConfigSizes,
    config_digest,
    read_config,
    refuse_dropout,
    trained_family,
)
from highwater.model.model_place import ModelPlace, model_place
from highwater.model.rope_block import own_rope_scaling
from highwater.model.weight_files import refuse_quantised, unties
from highwater.nouns.codec import Record

_MOST_PARAMETERS = 10**15
"""No model has more parameters; with more, bytes would not fit into the 64 bits of a document."""
STATE_BYTES_PER_PARAMETER = 16
"""float32: parameter, gradient and both moments of AdamW."""


class ModelShape(Record, frozen=True, kw_only=True):
    """The sizes of a decoder-only transformer. Source: the fields of the same meaning in
    ``config.json``.

    Code that sums over layers reads ``runs``; the other fields about layers remain because studies
    have recorded them since the first version.
    """

    model_type: str
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP, or of one expert in a mixture of experts."""
    vocab_size: int
    native_length_tokens: int
    """``max_position_embeddings``: the longest length the model was made for."""
    tied_embeddings: bool
    """True if the head is the embedding: by the config, unless weight files hold different ones."""
    experts: int = 1
    experts_per_token: int = 1
    balanced_experts: bool = False
    """True if the config enables the routers' auxiliary loss, for which probabilities are kept."""
    shared_expert_size: int = 0
    """Width of the shared MLP, which every token goes through besides its experts; 0: none."""
    dense_layers: int = 0
    """Number of layers in a mixture of experts that have one MLP in place of experts."""
    dense_intermediate_size: int = 0
    """Width of the MLP of ``dense_layers``."""
    mlp_matrices: int = 3
    """Weight matrices of an MLP: gate, up and down; 2 without a gate."""
    layer_runs: tuple[LayerRun, ...] | msgspec.UnsetType = msgspec.UNSET
    """The layers, if the fields above cannot describe them: layers with a window, sinks, a cap,
    gates or a state along the sequence, or layers without experts behind others. Else unset, and
    not written to documents."""
    layer_vocab_size: int | msgspec.UnsetType = msgspec.UNSET
    """Rows of the table of the layers' own embeddings. Without: unset, and not written."""
    small_parameters: int | msgspec.UnsetType = msgspec.UNSET
    """Number of biases, head norms and the like, if the config changes the defaults of its class.
    Else unset, and not written to documents."""

    def __post_init__(self) -> None:
        """Raise ModelError for runs with another number of layers, or of another hidden size."""
        runs = self.layer_runs
        if runs is msgspec.UNSET:
            return
        is_whole = sum(run.count for run in runs) == self.layers
        if not is_whole or any(run.kind.hidden_size != self.hidden_size for run in runs):
            raise ModelError(
                f"the runs of a {self.model_type} are not its {self.layers} layers of hidden size "
                f"{self.hidden_size}",
                hint="read the model anew: its config.json names its layers",
            )

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """The layers from embedding to head, as stretches of equal layers."""
        return self.layer_runs or _runs_by_sizes(self)

    @property
    def window_tokens(self) -> int | None:
        """The shortest window in tokens: the longest document that every layer attends to as a
        whole. None if no layer has a window.
        """
        windows = (run.kind.attention.window_tokens for run in self.runs)
        return min((window for window in windows if window is not None), default=None)

    @property
    def caps_scores(self) -> bool:
        """True if any layer caps its attention scores, which no fused kernel supports."""
        return any(run.kind.attention.soft_cap is not None for run in self.runs)

    @property
    def has_plain_attention(self) -> bool:
        """True if every layer has plain causal attention: no window, sink, cap or delta rule."""
        kinds = (run.kind.attention for run in self.runs)
        return not any(
            each.window_tokens or each.has_sinks or each.soft_cap or each.delta for each in kinds
        )

    @property
    def delta(self) -> AttentionKind | None:
        """The attention of the layers with a gated delta rule; None if the model has none."""
        kinds = (run.kind.attention for run in self.runs)
        return next((each for each in kinds if each.delta is not None), None)

    @property
    def parameters(self) -> int:
        """Number of parameters, the same as in the family's own class in transformers."""
        return _parameters(self)

    @property
    def parameters_outside_layers(self) -> int:
        """Parameters of embedding, head, the last norm, and the layers' own embeddings."""
        tables = 1 if self.tied_embeddings else 2
        of_layers = sum(each.rows * each.row_size for each in self.layer_tables)
        a_norm = self.runs[0].kind.embedding_size
        return tables * self.vocab_size * self.hidden_size + self.hidden_size + of_layers + a_norm

    @property
    def layer_tables(self) -> tuple[Matrices, ...]:
        """The matrices of the layers' own embeddings, concatenated over all layers: a table by
        token, and a projection of the first layer's input. Empty for models without them.
        """
        if self.layer_vocab_size is msgspec.UNSET:
            return ()
        numbers = sum(run.count * run.kind.embedding_size for run in self.runs)
        of_tokens = Matrices(1, self.layer_vocab_size, numbers)
        return (of_tokens, Matrices(1, numbers, self.hidden_size))

    @property
    def widest_head(self) -> int:
        """Largest head size of any layer."""
        return max(run.kind.attention.head_dim for run in self.runs)

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied by: in layers (only its experts), and the head."""
        in_layers = sum(run.count * run.kind.matmul_parameters for run in self.runs)
        projected = sum(each.rows * each.row_size for each in self.layer_tables[1:])
        return in_layers + projected + self.vocab_size * self.hidden_size


@lru_cache(maxsize=256)
def _parameters(shape: ModelShape) -> int:
    small = shape.small_parameters
    if small is msgspec.UNSET:
        small = small_parameters(
            shape.model_type,
            shape.runs,
            hidden_size=shape.hidden_size,
            native_length_tokens=shape.native_length_tokens,
        )
    in_layers = sum(run.count * run.kind.parameters for run in shape.runs)
    return in_layers + shape.parameters_outside_layers + small


@lru_cache(maxsize=256)
def _runs_by_sizes(shape: ModelShape) -> tuple[LayerRun, ...]:
    """Stretches of equal layers if no ``layer_runs`` say: those without experts come first."""
    usual = LayerKind(
        hidden_size=shape.hidden_size,
        attention=AttentionKind(
            query_heads=shape.query_heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim
        ),
        mlp=MlpKind(
            width=shape.intermediate_size,
            matrices=shape.mlp_matrices,
            experts=shape.experts,
            experts_per_token=shape.experts_per_token,
            shared_width=shape.shared_expert_size,
        ),
    )
    dense = usual.replace(
        mlp=MlpKind(width=shape.dense_intermediate_size, matrices=shape.mlp_matrices)
    )
    return runs_of(((shape.dense_layers, dense), (shape.layers - shape.dense_layers, usual)))


class Model(Record, frozen=True, kw_only=True):
    """A model that can be trained: its name, its directory, its shape, a digest of its config."""

    name: str
    """Name in tables and log paths: last part of the path or of the Hub's id, or the catalog's."""
    directory: str
    """Absolute path of the directory with ``config.json``, and maybe ``*.safetensors``."""
    config_digest: str
    """Digest of the parsed ``config.json``: two paths with one digest are one model."""
    shape: ModelShape
    own_rope_scaling: bool
    """True if the config has RoPE scaling of its own."""
    rope: bool = True
    """True if positions are RoPE, which can be scaled past the native length."""
    text_of: str | msgspec.UnsetType = msgspec.UNSET
    """Multimodal family whose text model this is; else unset, and not written to documents."""


def load_model(name: str) -> Model:
    """Load a model by a directory with ``config.json``, an id on the Hugging Face Hub such as
    ``Qwen/Qwen2.5-7B-Instruct``, or a catalog name such as ``Qwen3-0.6B``; model/model_place.py
    says where it is looked for.

    Raises ModelError if there is none, if the config lacks a field that training needs, or if the
    weight files, by their headers, are quantised, incomplete or no model's (model/weight_files.py).
    """
    place = model_place(name)
    # models in the package never change
    return _kept(place) if place.opened_as is None else _read(place)


def _read(place: ModelPlace) -> Model:
    directory, source = place.directory, str(place.directory / "config.json")
    config = read_config(directory / "config.json")
    shape = shape_of(config, source=source)
    refuse_quantised(directory, config)
    refuse_dropout(config, source)
    if shape.tied_embeddings and unties(directory):
        shape = shape.replace(tied_embeddings=False)
    return Model(
        name=place.name,
        directory=str(directory),
        config_digest=config_digest(config, source),
        shape=shape,
        own_rope_scaling=own_rope_scaling(config, source),
        rope=family_row(shape.model_type).has_rope,
        text_of=config.get(TEXT_OF, msgspec.UNSET),
    )


_kept = lru_cache(maxsize=None)(_read)


def shape_of(config: dict[str, Any], *, source: str) -> ModelShape:
    """The shape in a parsed ``config.json``; ``source`` names the config in errors. Missing fields
    have the defaults of the class in transformers.

    Raises ModelError for missing fields without a default, impossible sizes, encoder-decoder models
    and models that read more than text.
    """
    family = trained_family(config, source)
    sizes = ConfigSizes(config, source)
    heads, mixture = sizes.heads(), sizes.mixture()
    shape = ModelShape(
        model_type=family,
        hidden_size=sizes.size("hidden_size"),
        layers=sizes.layers(),
        query_heads=heads.query_heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        intermediate_size=mixture.width,
        vocab_size=sizes.size("vocab_size"),
        native_length_tokens=sizes.size("max_position_embeddings"),
        tied_embeddings=sizes.tied_embeddings(),
        experts=mixture.experts,
        experts_per_token=mixture.experts_per_token,
        balanced_experts=mixture.experts > 1
        and config.get("output_router_logits") is True
        and config.get("router_aux_loss_coef") != 0,
        shared_expert_size=mixture.shared_size,
        dense_layers=mixture.dense_layers,
        dense_intermediate_size=mixture.dense_width if mixture.dense_layers else 0,
        mlp_matrices=3 if family_row(family).is_gated else 2,
    )
    if shape.experts_per_token > shape.experts > 1:
        names = (name for name in EXPERTS_PER_TOKEN if config.get(name) is not None)
        raise ModelError(
            f"each token goes to {shape.experts_per_token} experts of {shape.experts} in {source}",
            hint=f"set {next(names, EXPERTS_PER_TOKEN[0])} to {shape.experts} or less",
        )
    if shape.parameters > _MOST_PARAMETERS:
        raise ModelError(
            f"{source} describes {shape.parameters} parameters, more than any model has",
            hint="check its sizes",
        )
    runs = _runs(shape, sizes)
    if runs != shape.runs:
        shape = shape.replace(layer_runs=runs)
    if runs[0].kind.embedding_size:
        rows = sizes.optional_size("vocab_size_per_layer_input")
        shape = shape.replace(layer_vocab_size=rows)
    return _with_switches(shape, config)


def _runs(shape: ModelShape, sizes: ConfigSizes) -> tuple[LayerRun, ...]:
    """Stretches of equal layers by all of the config, for a shape that has the sizes only."""
    dense = sizes.layers_without_experts(sizes.mixture())
    without, usual = shape.runs[0].kind, shape.runs[-1].kind
    has_unlike = family_row(shape.model_type).has_unlike_layers
    embedding = sizes.layer_embedding() if has_unlike else 0
    doubles = has_unlike and bool(sizes.config.get("use_double_wide_mlp"))

    def layer(kind: LayerKind, attention: AttentionKind) -> LayerKind:
        width = kind.mlp.plain_width * (2 if doubles and attention.reads_earlier_keys else 1)
        own = {"shared_width" if kind.mlp.is_routed else "width": width}
        mlp = kind.mlp.replace(**own)
        return kind.replace(attention=attention, mlp=mlp, embedding_size=embedding)

    return runs_of(
        (1, layer(without if is_dense else usual, attention))
        for attention, is_dense in zip(sizes.attention(), dense, strict=True)
    )


def _with_switches(shape: ModelShape, config: dict[str, Any]) -> ModelShape:
    """The shape with ``small_parameters`` set if the config changes the defaults of its class."""
    usual, own = (
        small_parameters(
            shape.model_type,
            shape.runs,
            hidden_size=shape.hidden_size,
            native_length_tokens=shape.native_length_tokens,
            config=switches,
        )
        for switches in (None, config)
    )
    return shape if usual == own else shape.replace(small_parameters=own)
