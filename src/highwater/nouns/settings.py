"""Settings of a training step, apart from model, length and GPUs; and their descriptions in words,
a few for a table's column, in full for a sentence.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from highwater.errors import UsageError
from highwater.nouns import declaration as kinds
from highwater.nouns.codec import Record
from highwater.nouns.declaration import (
    IN_A_STEP,
    MOST_SEQUENCES,
    PAPER,
    PREDICTING_COMMANDS,
    TRAINED,
    TRIAL_COMMANDS,
    DeclaredRecord,
    Setting,
    setting,
)
from highwater.nouns.layout import Layout
from highwater.nouns.objective import (
    ALL_LINEAR,
    OPTIMIZERS,
    TRAITS,
    Lora,
    LoraBase,
    Objective,
    ObjectiveTraits,
    OptimizerName,
    OptimizerTraits,
)
from highwater.nouns.sparse_pattern import (
    READ_BY,
    WINDOWED,
    PatternType,
    SparsePatternConfig,
    SparsityRatio,
)
from highwater.units import counted, format_bytes

Strategy = Literal["fsdp", "fsdp2"]
Allocator = Literal["native", "expandable"]
Loss = Literal["full", "chunked"]
Entropy = Literal["none", "full", "chunked"]
Recompute = Literal["none", "layer", "all-but-attention"]
Rope = Literal["auto", "yarn"]
SaveHf = Literal["always", "never", "last"]
Checkpoint = Literal["none", "sharded"]
AttentionMethod = Literal["dense", "block_sparse"]
Parameters = Literal["float32", "bf16"]
Offload = bool | Literal["states"]
DeepSpeed = Literal[
    "none", "zero2", "zero2-offload", "zero3", "zero3-optimizer-offload", "zero3-offload"
]
Activations = Literal["gpu", "host"]
HOST_SHARE = 0.85
"""Share of a machine's memory, or of its control group's, that activations may take."""


_PATTERN = SparsePatternConfig()
PATTERN_FIELDS = (
    "pattern_type",
    "sparsity_ratio",
    "block_size",
    "local_window_size",
    "global_tokens",
)
"""Fields of a sparse pattern, which have the same names in a rung."""


class ActivationPlan(Record, frozen=True, kw_only=True):
    """Which layers keep their activations on the GPU, and which on the host; the first is 0."""

    layers: int
    layers_on_gpu: int
    """Number of last layers whose activations stay on the GPU; all, if none go to the host."""

    @property
    def layers_on_host(self) -> int:
        """Number of layers, from the first on, whose activations go to the host."""
        return max(0, self.layers - self.layers_on_gpu)

    def first_on_gpu(self, layer: int) -> int:
        """First layer whose activations are on the GPU during the backward pass of ``layer``: with
        activations on the host the layer before it, as they are already being copied back.
        """
        return max(0, min(layer - 1, self.layers_on_host)) if self.layers_on_host else 0


class Settings(DeclaredRecord, frozen=True, kw_only=True):
    """Settings of one training step: loss, allocator, offload, optimizer, adapters and so on."""

    strategy: Strategy = setting(
        "fsdp2", "how parameters, gradients and optimizer states are sharded"
    )
    allocator: Allocator = setting(
        "native",
        "only settings with this allocator; default: with each, `try`: native",
        helps={
            "train": "PyTorch's allocator of GPU memory; default: native, or what is "
            "recommended where no setting is named"
        },
        labels={"expandable": "Env"},
        told={"expandable": ("expandable", "expandable segments")},
    )
    loss: Loss = setting(
        "full",
        "only settings with this loss; default: with each, `try`: full",
        helps={
            "train": "logits of all tokens at once, or of a chunk at a time; default: full, or "
            "what is recommended where no setting is named"
        },
        labels={"chunked": "chunked"},
        told={"chunked": ("chunked loss", "a chunked loss")},
    )
    """``full`` keeps the logits of a whole micro-batch; ``chunked`` never more than one chunk."""
    liger: Literal["all", "loss"] = setting(
        "all",
        "a chunked loss in the step of Hugging Face's Trainer: beside all of Liger's kernels, or "
        "loss: beside transformers' own layers",
        commands=PAPER,
        labels={"loss": "fused-loss-alone"},
        told={"loss": ("Liger's loss alone",) * 2},
    )
    entropy: Entropy = setting(
        "none",
        "entropy in the loss of grpo and ppo: none, full, or chunked (recomputed)",
        labels={"chunked": "entropy-saving"},
        says_what=True,
        told={"chunked": ("chunked entropy", "a chunked entropy")},
    )
    """``full``: from the loss's own logits; ``chunked``: recomputed, and the log-probability from
    the same chunks: the logits are never whole, whatever ``loss`` says."""
    optimizer: OptimizerName = setting(
        "adamw",
        "adamw: 16 bytes of states a parameter; adamw-8bit: 10, moments of 8 bits; adamw-bf16: "
        "12, moments in bfloat16; the last two are torchao's, and lossy: moments are rounded",
        other_label="{}",
        says_what=True,
        moves_loss=True,
    )
    """``OPTIMIZERS`` (nouns/objective.py) says what each keeps and needs."""
    paged: bool = kinds.SWITCH(
        False,
        "the optimizer is bitsandbytes' paged one: CUDA moves its moments between GPU and host; in "
        "the step of Hugging Face's Trainer",
        PAPER,
        labels={True: "paged"},
        told={True: ("moments paged", "the optimizer's moments in paged memory")},
    )
    """By bitsandbytes' source, and never measured here (``paged_bytes`` in model/held_bytes.py)."""
    parameters: Parameters = setting(
        "float32",
        "float32, or bf16 with adamw-8bit and adamw-bf16 (6 and 8 bytes of states a parameter), "
        "and one micro-batch a step; lossy: each update is rounded at random",
        labels={"bf16": "bf16-parameters"},
        says_what=True,
        moves_loss=True,
    )
    """``bf16``: an update rounds to either neighbour at random (engine/training/low_bit.py)."""
    offload: Offload = kinds.OFFLOAD(
        False,
        "keep parameters, gradients and optimizer states in host memory; states: the optimizer's "
        "moments alone, and the GPU updates, bit by bit as without; false: neither is tried",
        labels={True: "Offload", "states": "Offload-states"},
        told={
            True: ("states on host", "all states in host memory"),
            "states": ("moments on host", "the optimizer's moments in host memory"),
        },
    )
    """Both are truthy: ask ``offloads_model`` and ``offloads_states`` (training/host_states.py)."""
    deepspeed: DeepSpeed = setting(
        "none",
        "share states by DeepSpeed in the place of FSDP, in the step of Hugging Face's Trainer: "
        "ZeRO-2 or ZeRO-3; -offload: the optimizer in host memory, with zero3 the parameters, too",
        commands=PAPER,
        other_label="{}",
        told={...: ("DeepSpeed {}",) * 2},
    )
    """By DeepSpeed's source, compared with thirteen steps on GPUs (trainers/hugging_face.py)."""
    deepspeed_bucket: int | None = kinds.COUNT(
        None,
        "numbers of DeepSpeed's bucket of gradients, `reduce_bucket_size`; default: the square of "
        "the hidden size, as `auto` has it",
        PAPER,
        example=500_000_000,
        other_label="bucket-{}",
        told={...: ("buckets of {}", "gradients in buckets of {}")},
    )
    lora: int | None = kinds.COUNT(
        None,
        "train LoRA adapters of this rank; the model is frozen, in bf16",
        metavar="RANK",
        example=16,
        other_label="LoRA-{}",
        says_what=True,
    )
    """None: all of the model is trained."""
    lora_alpha: float | None = kinds.NUMBER(
        None,
        "adapters are multiplied by this over their rank; default: twice the rank",
        metavar="ALPHA",
        example=32,
        other_label="alpha-{:g}",
        says_what=True,
    )
    lora_targets: str = kinds.NAMES(
        ALL_LINEAR,
        "linear layers with an adapter: all-linear, or names with commas between them",
        other_label="on-{}",
        says_what=True,
    )
    lora_base: LoraBase = setting(
        "bf16",
        "what LoRA's frozen model is in: bf16, or its linear layers in nf4, 4 bits a number, "
        "which is QLoRA (typed `--qlora 16`, too), by bitsandbytes, and lossy",
        labels={"nf4": "NF4"},
        says_what=True,
    )
    lora_merged: bool = kinds.SWITCH(
        False,
        "what is saved is the model with its adapters in it, and not the adapters",
        TRAINED,
        says_what=True,
    )
    objective: Objective = setting(
        "sft",
        "what is minimised, as the mean over all trained tokens of a step (TRL's dapo, verl's "
        "token-mean)",
        says_what=True,
        moves_loss=True,
    )
    """The negative log-likelihood, GRPO's or PPO's clip loss, or over pairs a reward model's loss
    or DPO's. What each needs is in nouns/objective.py."""
    critic: bool = kinds.SWITCH(
        False, "ppo: train a model of token values along", says_what=True, moves_loss=True
    )
    sequences_per_micro_batch: int = kinds.COUNT(
        1, "sequences packed into one micro-batch; default: 1, of pairs 2", says_what=True
    )
    """They are packed without padding."""
    token_budget_tokens: int | None = kinds.TOKENS(
        None,
        "tokens of a micro-batch for each GPU: packs as many sequences as they hold",
        PREDICTING_COMMANDS,
        name="token_budget",
        says_what=True,
    )
    """None: the number of sequences is given."""
    recompute: Recompute = setting(
        "layer",
        "activations recomputed in the backward pass",
        labels={"none": "no-recompute", "all-but-attention": "attention-kept"},
        other_label="recompute-{}",
        told={
            "all-but-attention": ("attention's outputs kept",) * 2,
            "none": ("no recomputation",) * 2,
        },
    )
    """Nothing, each decoder layer, or all of a layer but its attention kernel: the last is faster,
    the more so the longer the sequence, and keeps one more number per token and query channel."""
    activations: Activations = setting(
        "gpu",
        "where recomputed layers keep what their backward pass needs: gpu, host memory, or auto: "
        "either; one trial or training takes the fastest that is predicted to fit",
        labels={"host": "activations-on-host"},
        told={"host": ("activations on host", "the layers' activations in host memory")},
    )
    """Kept: each layer's input, and attention's output if not recomputed (activations/host.py)."""
    layers_on_gpu: int = kinds.COUNT(
        1,
        "activations host: the last layers, whose activations stay on the GPU",
        other_label="last-{}-on-gpu",
        told={...: ("last {} on GPU", "activations of the last {} layers on the GPU")},
    )
    """At least one: during its backward pass the other layers' activations begin to come back."""
    mlp_tiles: int | None = kinds.COUNT(
        None,
        "tiles over the tokens that an MLP goes in; default: as recompute has them for free",
        example=8,
        other_label="mlp-tiles-{}",
        told={...: ("{} MLP tiles", "MLPs in {} tiles")},
    )
    """1: all at once. None: tiles of a fixed size where layers are recomputed, else none."""
    attention_head_groups: int = kinds.COUNT(
        1,
        "groups of key/value heads whose attention is computed one after the other in a recomputed "
        "layer, for less memory; 1: all heads at once",
        example=4,
        other_label="head-groups-{}",
        told={...: ("{} head groups", "attention in {} head groups")},
    )
    """Queries, keys and values are projected once more (engine/models/fused/head_groups.py)."""
    rope: Rope = setting(
        "auto",
        "auto: YaRN past the native length, unless the model scales itself; yarn: all the same",
        says_what=True,
        moves_loss=True,
    )
    save_hf: SaveHf = setting(
        "never", "when Hugging Face weights are written", commands=TRIAL_COMMANDS, says_what=True
    )
    """After every step (``always``), no step (``never``) or the ``last``."""
    checkpoint: Checkpoint = setting(
        "none", "sharded: write model and optimizer after the last step", commands=TRIAL_COMMANDS
    )
    accumulates: bool = kinds.COUNT(
        True,
        "micro-batches of a step; 1: gradients are made in its backward pass, and take no "
        "memory before",
        IN_A_STEP,
        name="micro_batches",
        typed={True: 2, False: 1},
        labels={False: "one-micro-batch"},
        told={False: ("one micro-batch", "one micro-batch a step")},
    )
    """Gradients of two or more micro-batches are added up in a step. False: a step has one."""
    attention: AttentionMethod = setting(
        "dense",
        "dense, or block_sparse: each block of tokens reads the blocks that a pattern keeps, "
        "which changes the model",
        labels={"block_sparse": "block-sparse"},
        moves_loss=True,
    )
    pattern_type: PatternType = setting(
        _PATTERN.pattern_type,
        "block_sparse: which blocks are kept",
        labels={"dilated_sparse": ""},
        other_label="{}",
        moves_loss=True,
    )
    sparsity_ratio: SparsityRatio = kinds.SHARE(
        _PATTERN.sparsity_ratio,
        "block_sparse: share of earlier blocks that is KEPT, or adaptive (5 % to 64k tokens, "
        "2 % to 128k, 1 % above); default: 0.1, or what the window gives",
        other_label="kept-{}",
        moves_loss=True,
    )
    block_size: int = kinds.COUNT(
        _PATTERN.block_size,
        "block_sparse: tokens of a block",
        example=128,
        other_label="block-{}",
        moves_loss=True,
    )
    local_window_size: int = kinds.COUNT(
        _PATTERN.local_window_size,
        "block_sparse: tokens that local_window and global_local read, back from each",
        example=512,
        other_label="window-{}",
        moves_loss=True,
    )
    global_tokens: int = kinds.COUNT(
        _PATTERN.global_tokens,
        "block_sparse: first tokens of a document, which global_local reads from everywhere",
        example=64,
        other_label="global-{}",
        moves_loss=True,
    )

    def __post_init__(self) -> None:
        """Raise UsageError for counts out of range, and for settings that exclude each other."""
        for name, words, more in _COUNTED:
            flag, count = RUNG_ROWS[name].flag, getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"{count} {words}", hint=f"use `{flag} 1`{more}")
            if (count or 1) > MOST_SEQUENCES:
                problem = f"{count} {words}, and {MOST_SEQUENCES} is the most"
                raise UsageError(problem, hint=f"use `{flag} {MOST_SEQUENCES}` or fewer")
        for is_broken, problem, hint in _REFUSED:
            if is_broken(self):
                raise UsageError(problem.format(s=self), hint=hint.format(s=self))
        _refuse_idle(self)
        _ = self.adapters  # made once here, so that it is refused here

    def sequences(self, length_tokens: int, *, context_degree: int) -> int:
        """Sequences of this length in a micro-batch; 0: the token budget is too small for one."""
        if self.token_budget_tokens is None:
            return self.sequences_per_micro_batch
        held = self.token_budget_tokens * context_degree // length_tokens
        together = self.traits.documents_together
        return held // together * together

    def activation_plan(self, layers: int) -> ActivationPlan:
        """Where the activations of a model with ``layers`` layers are kept."""
        on_gpu = layers if self.activations == "gpu" else min(self.layers_on_gpu, layers)
        return ActivationPlan(layers=layers, layers_on_gpu=on_gpu)

    def longest_tokens(self, *, context_degree: int) -> int | None:
        """Longest sequence, in tokens, within the token budget; None if there is no budget."""
        if self.token_budget_tokens is None:
            return None
        return self.token_budget_tokens * context_degree // self.traits.documents_together

    @property
    def named(self) -> frozenset[str]:
        """Names of the fields that differ from their defaults."""
        usual = Settings()
        fields = self.__struct_fields__
        return frozenset(name for name in fields if getattr(self, name) != getattr(usual, name))

    @property
    def traits(self) -> ObjectiveTraits:
        """What the objective needs of data and models."""
        return TRAITS[self.objective]

    @property
    def adapters(self) -> Lora | None:
        """The LoRA adapters to train; None if the model's own parameters are trained."""
        if self.lora is None:
            return None
        alpha = 2 * self.lora if self.lora_alpha is None else self.lora_alpha
        return Lora(rank=self.lora, alpha=alpha, targets=self.lora_targets, base=self.lora_base)

    @property
    def has_second_model(self) -> bool:
        """True if a reference model is held; with adapters, the policy without them serves."""
        return self.traits.has_reference and self.lora is None

    @property
    def offloads_model(self) -> bool:
        """True if parameters, gradients and optimizer states are all in host memory."""
        return self.offload is True

    @property
    def offloads_states(self) -> bool:
        """True if the optimizer's moments alone are in host memory."""
        return self.offload == "states"

    @property
    def uses_host(self) -> bool:
        """True if states or activations are in host memory."""
        is_offloaded = self.offload is not False or "offload" in self.deepspeed
        return is_offloaded or self.paged or self.activations == "host"

    @property
    def optimizer_traits(self) -> OptimizerTraits:
        """What the optimizer stores for each number."""
        return OPTIMIZERS[self.optimizer]

    @property
    def pattern(self) -> SparsePatternConfig | None:
        """The sparse pattern of attention; None: dense attention keeps every key."""
        if self.attention == "dense":
            return None
        return SparsePatternConfig(**{name: getattr(self, name) for name in PATTERN_FIELDS})

    @property
    def trained_models(self) -> int:
        """Number of models with gradients and optimizer states."""
        return 2 if self.critic else 1

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients are allocated for the whole step: when they accumulate over
        micro-batches, or are offloaded. Else the backward pass allocates them while activations are
        freed, and the update frees them.
        """
        return self.accumulates or self.offloads_model

    @property
    def holds_logits(self) -> bool:
        """True if the logits of a whole micro-batch exist at once, as without a chunked loss."""
        return self.loss == "full" and self.entropy != "chunked" and not self.traits.gives_scalars

    @property
    def label(self) -> str:
        """Name of the settings as in published guides: ``vanilla``, ``Env``, ``Env + Offload``."""
        parts = (row.label_of(getattr(self, row.sets)) for row in _IN_A_LABEL)
        return " + ".join(filter(None, parts)) or "vanilla"

    @property
    def slug(self) -> str:
        """The settings' name in paths, ``env+offload``: the label in lower case, without spaces."""
        return self.label.lower().replace(" ", "")


RUNG_ROWS = {row.sets: row for row in Settings.declared}
"""The declared settings of a rung, by field."""
_FIRST_IN_A_LABEL = (
    *("allocator", "offload", "activations", "loss", "entropy", "recompute", "mlp_tiles"),
    *("attention_head_groups", "attention"),
    *(*PATTERN_FIELDS, "lora", "lora_alpha", "lora_targets", "lora_base"),
)
"""Settings that a label tells first; the first two as in the published guides: "Env + Offload"."""
_IN_A_LABEL: tuple[Setting, ...] = (
    *(RUNG_ROWS[name] for name in _FIRST_IN_A_LABEL),
    *(
        row
        for row in RUNG_ROWS.values()
        if (row.labels or row.other_label) and row.name not in _FIRST_IN_A_LABEL
    ),
)


_COUNTED = (
    ("sequences_per_micro_batch", "sequences per micro-batch", ""),
    ("mlp_tiles", "MLP tiles", " or more, or leave it out"),
)
"""Settings between 1 and ``MOST_SEQUENCES``: in words, and what a hint for a lower value adds."""
_REFUSED: tuple[tuple[Callable[[Settings], bool], str, str], ...] = (
    (
        lambda s: s.token_budget_tokens is not None and s.token_budget_tokens < 1,
        "a token budget of {s.token_budget_tokens}",
        "for example `--token-budget 16k`",
    ),
    (
        lambda s: s.attention_head_groups < 1,
        "{s.attention_head_groups} head groups",
        "use `--attention-head-groups 1` or more, or leave it out",
    ),
    (
        lambda s: s.attention_head_groups > 1 and s.recompute == "none",
        "head groups are computed again in the backward pass, and nothing else is recomputed",
        "use `--recompute layer`, or leave `--attention-head-groups` out",
    ),
    (
        lambda s: s.attention_head_groups > 1 and s.pattern is not None,
        "block-sparse attention does not go in head groups",
        "leave `--attention-head-groups` out, or `--attention`",
    ),
    (
        lambda s: s.critic and not s.traits.critic,
        "the objective {s.objective} has no critic",
        "use `--objective ppo`, or leave `--critic` out",
    ),
    (
        lambda s: s.entropy != "none" and s.traits.advantages == "none",
        "the objective {s.objective} has no entropy in it",
        "use `--entropy none`",
    ),
    (
        lambda s: (
            s.traits.pairs and s.token_budget_tokens is None and s.sequences_per_micro_batch % 2 > 0
        ),
        "{s.objective} trains on pairs, and {s.sequences_per_micro_batch} sequences per "
        "micro-batch are not",
        "use `--sequences-per-micro-batch 2`",
    ),
    (  # in a user's flags, before the pattern says it in Python's words
        lambda s: (
            s.attention == "block_sparse"
            and s.pattern_type in WINDOWED
            and s.sparsity_ratio is not None
        ),
        "sparsity ratio {s.sparsity_ratio}: the window of {s.pattern_type} says what is kept",
        "leave `--sparsity-ratio` out, or use `--pattern-type dilated_sparse`",
    ),
    (
        lambda s: s.pattern is not None and s.recompute == "all-but-attention",
        "block-sparse attention is not kept in recomputation: it is the cheap part",
        "use `--recompute layer`, or `--recompute none`",
    ),
    (
        lambda s: s.lora is not None and s.lora_merged and s.save_hf == "never",
        "merged adapters, and nothing is saved",
        "add `--save-hf last`, or leave `--lora-merged` out",
    ),
    (
        lambda s: s.lora is not None and s.strategy != "fsdp2",
        "LoRA keeps frozen and trained parameters apart, and FSDP1 has them in one piece",
        "use `--strategy fsdp2`",
    ),
    (
        lambda s: s.lora is not None and s.lora_base == "nf4" and s.offloads_model,
        "a model in nf4 stays on the GPU, and `--offload` has it come from the host",
        "leave `--offload` out, or use `--lora-base bf16`",
    ),
    (
        lambda s: s.lora is not None and s.lora_base == "nf4" and s.lora_merged,
        "adapters were trained beside a model in nf4, and would be merged into another one",
        "leave `--lora-merged` out: peft merges them into the model of your choice",
    ),
    (
        lambda s: s.parameters != "float32" and s.lora is not None,
        "LoRA's adapters are trained in float32, and the model beside them is in bf16 already",
        "leave `--parameters` out",
    ),
    (
        lambda s: s.parameters != "float32" and s.optimizer == "adamw",
        "adamw rounds to the nearest, which loses small updates of parameters in bf16",
        "use `--optimizer adamw-8bit`, which rounds them at random, or `--parameters float32`",
    ),
    (
        lambda s: s.parameters != "float32" and s.accumulates,
        "gradients of parameters in bf16 would be added up in bf16, micro-batch by micro-batch",
        "use `--micro-batches 1`, or `--parameters float32`",
    ),
    (
        lambda s: s.optimizer != "adamw" and s.offloads_model,
        "{s.optimizer} updates on the GPU, and `--offload` on the host",
        "use `--optimizer adamw`, or leave `--offload` out",
    ),
    (
        lambda s: s.optimizer != "adamw" and s.strategy != "fsdp2",
        "{s.optimizer} has a moment for each tensor's shard, and FSDP1 flat ones",
        "use `--strategy fsdp2`, or `--optimizer adamw`",
    ),
    (
        lambda s: s.optimizer != "adamw" and s.offloads_states,
        "`--offload states` keeps AdamW's moments in float32, and {s.optimizer} has its own",
        "use `--optimizer adamw`, or leave `--offload states` out",
    ),
    (
        lambda s: s.activations == "host" and s.recompute == "none",
        "`--recompute none` keeps all that a layer computes, and `--activations host` moves a "
        "recomputed layer's input",
        "use `--recompute layer` or `--recompute all-but-attention`",
    ),
    (
        lambda s: s.layers_on_gpu < 1,
        "{s.layers_on_gpu} layers on the GPU, and the last one's activations are used at once",
        "use `--layers-on-gpu 1` or more, or leave it out",
    ),
    (
        lambda s: (
            s.deepspeed != "none"
            and (s.parameters, s.optimizer, s.offload, s.paged)
            != ("float32", "adamw", False, False)
        ),
        "DeepSpeed {s.deepspeed} has its own parameters in bf16, AdamW's states in float32 and "
        "words for what is in host memory",
        "leave `--parameters`, `--optimizer`, `--paged` and `--offload` out, or `--deepspeed`",
    ),
    (
        lambda s: s.paged and s.optimizer == "adamw-bf16",
        "bitsandbytes pages moments of 8 and of 32 bits, and adamw-bf16 is torchao's",
        "use `--optimizer adamw-8bit` or `--optimizer adamw`, or leave `--paged` out",
    ),
    (
        lambda s: s.deepspeed != "none" and s.lora is not None and s.lora_base == "nf4",
        "a model in nf4 stays whole on each GPU, and ZeRO shares next to nothing else",
        "use `--copies` for each GPU's own, or `--lora-base bf16`",
    ),
    (
        lambda s: s.offloads_states and s.strategy != "fsdp2",
        "`--offload states` keeps the moments of each tensor's shard, and FSDP1 has flat ones",
        "use `--strategy fsdp2`, or `--offload`, which FSDP1 has",
    ),
)
"""Refusals: a test of the settings ``s``, and in their terms the problem and the hint."""


def _refuse_idle(settings: Settings) -> None:
    """Raise UsageError for a setting that has no effect beside the others."""
    kind, is_dense = settings.pattern_type, settings.attention == "dense"
    idle: dict[str, tuple[str, str]] = {}
    if is_dense:
        hint = "use `--attention block_sparse`, or leave `{}` out"
        idle |= dict.fromkeys(PATTERN_FIELDS, (": dense attention keeps every block", hint))
    for name, types in () if is_dense else READ_BY.items():
        if kind not in types:
            hint = f"leave `{{}}` out, or use `--pattern-type {types[-1]}`"
            idle[name] = f": {kind} does not read it", hint
    if settings.lora is None:
        hint = "add `--lora 32`, or leave `{}` out"
        lora = ("lora_alpha", "lora_targets", "lora_base", "lora_merged")
        idle |= dict.fromkeys(lora, (", and no LoRA", hint))
    if settings.activations == "gpu":
        hint = "add `--activations host`, or leave `{}` out"
        idle["layers_on_gpu"] = ": all layers keep their activations there", hint
    if settings.deepspeed == "none":
        hint = "add `--deepspeed zero3`, or leave `{}` out"
        idle["deepspeed_bucket"] = ", and no DeepSpeed", hint
    for name, (why, hint) in idle.items():
        row, value = RUNG_ROWS[name], getattr(settings, name)
        if value != row.default:
            raise UsageError(f"{row.words} {value}{why}", hint=hint.format(row.flag))


NOTHING_SET = "nothing set"
_IN_A_TABLE, _IN_A_SENTENCE = 0, 1


def shared_training(every: Iterable[Settings]) -> str:
    """Words for the training that all settings share, as ``LoRA of rank 16``; empty if usual."""
    said = {", ".join(other_training(settings)) for settings in every}
    return said.pop() if len(said) == 1 else ""


def short_settings(settings: Settings, *, but: str = "") -> str:
    """Settings in a few words for a table: ``expandable, chunked loss, states on host``; or
    ``nothing set``. ``but``: the kind of training, if a line above the table already says it.
    """
    told = _words(settings, _IN_A_TABLE)
    first = [told.pop(name) for name in ("allocator", "loss", "entropy", "offload") if name in told]
    if "activations" in told and settings.offload is not False:  # both on the host: said once
        first[-1] = f"{first[-1].removesuffix(' on host')}, {told.pop('activations')}"
    training = [] if but else other_training(settings)
    return ", ".join((*training, *first, *told.values())) or NOTHING_SET


def settings_in_words(
    settings: Settings,
    layout: Layout | None = None,
    *,
    host_bytes: int | None = None,
    says_rows: bool = False,
    is_scaled: bool = False,
    after_claim: bool = False,
) -> str:
    """Settings and degrees as the end of a sentence that says "with": ``expandable segments, a
    chunked loss and each sequence shared by 2 GPUs (Ulysses)``. ``host_bytes`` is the host memory
    that offload takes; ``says_rows`` asks for the sequences of a micro-batch, ``is_scaled`` says
    that YaRN scales the positions; ``after_claim``, that a claim before it has the degrees: how
    several GPUs hold one copy is said instead.
    """
    told = _words(settings, _IN_A_SENTENCE)
    first = [told.pop(name) for name in ("allocator", "loss", "entropy") if name in told]
    host = [told.pop("offload")] if "offload" in told else []
    takes = "" if host_bytes is None else f" ({format_bytes(host_bytes)} of it)"
    is_sharded = layout is not None and 1 == layout.replicate_degree < layout.gpus
    sharding = ["FSDP (as ZeRO-3)"] * (after_claim and is_sharded and settings.deepspeed == "none")
    said = [
        *other_training(settings),
        *sharding,
        *first,
        *told.values(),
        *(f"{each}{takes}" for each in host),
    ]
    said += [] if layout is None else _of_layout(layout, has_degrees=not after_claim)
    if says_rows:
        said.append(f"{counted(settings.sequences_per_micro_batch, 'sequence')} a micro-batch")
    said += ["YaRN"] if is_scaled else []
    return listed(said) or NOTHING_SET


def _words(settings: Settings, where: int) -> dict[str, str]:
    """Words for each setting that differs from its default, by the setting's name."""
    told: dict[str, str] = {}
    for row in _IN_A_LABEL:
        value = getattr(settings, row.sets)
        words, said = row.label_of(value), row.told.get(value, row.told.get(...))
        if words and said is not None:
            words = said[where].format(value)
        if words and row.name not in _OF_ANOTHER_TRAINING:
            told[row.name] = words
    if settings.traits.gives_scalars:  # without logits every loss is the same
        told.pop("loss", None)
    return told


_OF_ANOTHER_TRAINING = ("lora", "lora_targets", "lora_base", "optimizer", "parameters")


def other_training(settings: Settings) -> list[str]:
    """Words for the kind of training, unless it is full training by AdamW in float32: ``LoRA of
    rank 32 beside a model in NF4``, ``AdamW with moments of 8 bits``. Capacities of different kinds
    of training are not comparable.
    """
    said: list[str] = []
    if settings.lora is not None:
        base = " beside a model in NF4" if settings.lora_base == "nf4" else ""
        targets = RUNG_ROWS["lora_targets"].label_of(settings.lora_targets)
        on = f" on {targets.removeprefix('on-').replace(',', ', ')}" if targets else ""
        said.append(f"LoRA of rank {settings.lora}{on}{base}")
    if not settings.optimizer_traits.is_exact:
        said.append(settings.optimizer_traits.words)
    if settings.parameters == "bf16":
        said.append("parameters in bf16")
    return said


def listed(words: Sequence[str]) -> str:
    """Join words: ``a, b and c``."""
    *first, last = words or ("",)
    return f"{', '.join(first)} and {last}" if first else last


def _of_layout(layout: Layout, *, has_degrees: bool) -> list[str]:
    said: list[str] = []
    if has_degrees and layout.ulysses_degree > 1:
        said.append(f"each sequence shared by {layout.ulysses_degree} GPUs (Ulysses)")
    if has_degrees and layout.ring_degree > 1:
        said.append(f"a ring of {layout.ring_degree}")
    if layout.replicate_degree > 1:
        some = f"{layout.replicate_degree} copies of the model (as HSDP)"
        is_each = layout.replicate_degree == layout.gpus
        said.append("a copy on each GPU (as DDP)" if is_each else some)
    return said
