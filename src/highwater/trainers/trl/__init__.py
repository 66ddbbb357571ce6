"""TRL, which accelerate launches: its configuration (words.py), its trials (trial.py), and the
memory of a step by our engine's formula with TRL's differences.

- An MLP is computed untiled, and logits in tiles: Hugging Face's layers, and a fused head.
- The gradients of the head and of the hidden states are summed in float32, then rounded. The head
  itself is gathered by FSDP, in bfloat16: accelerate shards it with the last norm
  (``fsdp2_prepare_model``), so that it is there when the loss reads it.
- GRPO generates by the policy itself: keys and values of all completions of a GPU, and the memory
  of the prompts in one layer. Gradients are not there yet.
- There is no reference: GRPO has none by default (``beta`` of 0), and DPO's log-probabilities are
  computed before the training.
- The command that launches the training keeps a context on the first GPU.

Sources: ``ChunkedLogProbFunction`` in trl/kernels/chunked_logprob.py, ``add_fused_lm_head`` in
trl/trainer/utils.py and ``_generate`` in trl/trainer/grpo_trainer.py of trl 1.16.0;
accelerate/utils/fsdp_utils.py of accelerate 1.15.0; modeling_qwen3.py of transformers 5.23.0.

In the functions:  T tokens of a GPU's micro-batch  E hidden size  F width of an MLP
"""

from dataclasses import replace

from highwater.errors import UsageError
from highwater.memory.formula.constants import (
    CUBLAS_WORKSPACES_BYTES,
    GENERATION,
    LOSS,
    WORKSPACES,
    Footprint,
    Phase,
    Term,
    phase,
    present,
)
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import NUMBER_BYTES, Step
from highwater.memory.interval.calibration import edge_residuals
from highwater.memory.interval.residuals import Residual, refuse_silent
from highwater.memory.trainers import TrainerMemory
from highwater.model.held_bytes import resting_state_bytes
from highwater.model.layer_kind import LayerKind
from highwater.model.model import ModelShape
from highwater.nouns.codec import packaged
from highwater.nouns.layout import WIDEST_FUSED_HEAD
from highwater.nouns.objective import RolloutRequest, RolloutTraits, generation_micro_batches
from highwater.nouns.study import Study
from highwater.nouns.trainer import OF_FINETUNERS, SHARED, ForeignTraits, TrainerTraits
from highwater.nouns.trial import PROMPT_TOKENS, TrialSpec
from highwater.trainers.foreign import TrialStart
from highwater.trainers.targets import OF_LORA, OF_ROLLOUT, OF_THE_ENGINE, EmitTarget
from highwater.trainers.trl import trial
from highwater.trainers.trl.words import trl
from highwater.units import MIB

LAUNCHER_BYTES = 518 * MIB
"""Context of the process that launches the training, on the first GPU. Read off the errors of every
trial that ran out in docs/results/other_trainers/studies, on H100 and H200."""
_TILE_TOKENS, _TILE_WIDTH = 4096, 32768
"""Tokens and vocabulary in one tile of logits: TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE."""
_PREFILL_WIDTHS, _PREFILL_STREAMS = 3, 2
"""Tensors of T x F and of T x E for a prompt in one layer, without a backward pass: the activation,
the other branch and their product; the residual stream and the MLP's input."""


def footprint(step: Step) -> Footprint:
    """Memory that TRL's step most likely takes, on the fullest GPU."""
    settings = step.settings
    generates = settings.traits.advantages == "groups"
    settings = settings.replace(
        objective="sft" if settings.traits.has_reference else settings.objective,
        entropy="none",
        loss="chunked",
        mlp_tiles=None if settings.recompute == "none" else 1,
    )
    step = replace(step, settings=settings)
    ours = likely_footprint(step)
    phases = [_with_its_loss(each, step) if each.name == LOSS else each for each in ours.phases]
    if generates:
        phases.insert(0, _generation(step))
    launcher_bytes = LAUNCHER_BYTES if step.device == "cuda" else 0
    launcher = Term("context of TRL's launcher", launcher_bytes)
    return ours.replace(phases=tuple(phases), outside=present(*ours.outside, launcher))


def _with_its_loss(ours: Phase, step: Step) -> Phase:
    """The loss phase of TRL, if all tokens are trained: hidden states, a copy of the trained ones,
    their gradient in float32 and rounded (T x E each); and one tile of logits.
    """
    if step.settings.traits.gives_scalars:
        return ours
    hidden = step.tokens * step.shape.hidden_size
    own = {
        "hidden states": 3 * step.element_bytes * hidden,
        "gradient of the hidden states in float32": NUMBER_BYTES * hidden,
        "logits": step.element_bytes * min(step.tokens, _TILE_TOKENS) * _TILE_WIDTH,
        "gradient of the head": 0
        if step.is_frozen
        else (NUMBER_BYTES + step.element_bytes) * step.table_size,
    }
    others = (term for term in ours.terms if term.name not in own)
    return phase(ours.name, *others, *(Term(name, size) for name, size in own.items()))


def _generation(step: Step) -> Phase:
    """The phase in which the last layer reads the prompts, with keys and values of all layers."""
    settings, layout, shape = step.settings, step.layout, step.shape
    rows = settings.sequences_per_micro_batch
    sequences = rows * generation_micro_batches(rows, layout.gpus)
    kinds = [run.kind for run in shape.runs]
    tables = (1 if shape.tied_embeddings else 2) * step.element_bytes * step.table_size
    gathered = tables + 2 * max(map(step.gathered_bytes, kinds)) if step.gathers else 0
    kept = 0
    for run in shape.runs:
        attention = run.kind.attention  # which keeps no more than its window
        tokens = min(attention.window_tokens or step.length_tokens, step.length_tokens)
        kept += run.count * tokens * 2 * attention.key_size
    prompt = max(map(_prompt_numbers, kinds))
    workspaces = sum(CUBLAS_WORKSPACES_BYTES) if step.device == "cuda" else 0
    numbers = step.element_bytes * sequences
    return phase(
        GENERATION,
        Term("states without gradients", resting_state_bytes(shape, settings, layout)),
        Term(WORKSPACES, workspaces),
        Term("embedding and head, gathered", gathered),
        Term("keys and values of completions", numbers * kept),
        Term("a layer reading the prompts", numbers * step.length_tokens * prompt),
    )


def _prompt_numbers(kind: LayerKind) -> int:
    """Elements per token that a layer holds while it reads a prompt, besides keys and values."""
    width = kind.mlp.plain_width
    width += kind.mlp.width * kind.mlp.experts_per_token if kind.mlp.is_routed else 0
    return _PREFILL_STREAMS * kind.hidden_size + _PREFILL_WIDTHS * width


def _study_edges(study: Study, _: object) -> tuple[Residual, ...]:
    """Edges of a study of TRL. Raises UsageError for another trainer's study and without an edge,
    ModelError for a family that is not predicted.
    """
    refuse_silent(study, "trl")
    return edge_residuals(study, footprint)


def refuse(spec: TrialSpec, shape: ModelShape) -> None:
    """Raise UsageError for settings that TRL lacks, and for heads that no fused kernel takes."""
    if shape.widest_head > WIDEST_FUSED_HEAD:
        raise UsageError(
            f"nobody measured what TRL takes for {shape.model_type}'s heads of "
            f"{shape.widest_head} numbers, which no fused kernel takes",
            hint="leave `--trainer` out for this package's engine, whose own is predicted",
        )
    trial.refuse_unwritten(spec, shape)


PREDICTED = TrainerTraits(
    step="TRL's trainer, which accelerate launches",
    is_run=True,
    is_watched=True,
    settings=frozenset(
        (
            *("ulysses", "ring", "copies", "strategy", "allocator", "recompute", "offload"),
            *("sequences_per_micro_batch", "micro_batches", "objective", "entropy", "loss"),
            *("optimizer", "lora", "lora_alpha", "lora_targets", "lora_base"),
            *("rope", "headroom", "start_length", "resolution", "max_length"),
            *RolloutRequest.__struct_fields__,
        )
    ),
    traces="none",
    ring_objectives=frozenset(("sft",)),
    rollout=RolloutTraits(
        utilization=0.3,
        sleep_levels=(0, 2),
        sequences=None,
        batched_tokens=4096,
        is_in_the_trainer=True,
    ),
    usual_sequences=8,
    reference_first="precompute_ref_log_probs: true",
    targets=("trl", "accelerate"),
)
MEMORY = TrainerMemory(
    formula=footprint,
    accuracy="by this engine's formula with TRL's own loss and its MLP in one piece; its interval "
    "is learned from edges: of each search the longest length that fit and the shortest that ran "
    "out, between which lies what TRL needs; GRPO is taken to read nearly all of a sequence as its "
    "prompt, which takes the most",
    # its edges are made by docs/results/other_trainers/edges.py
    residuals=lambda: packaged("trainers/trl/trl_edges.json", tuple[Residual, ...]),
    learn=_study_edges,
    fixed_fields=lambda _: {
        "loss": "chunked",
        "allocator": "expandable",
        "prompt_tokens": PROMPT_TOKENS,
    },
    refuse=refuse,
)
TRIED = ForeignTraits(
    settings=OF_FINETUNERS | SHARED | {"rope", "objective", "strategy"},
    objectives=frozenset(("sft", "grpo")),
    loss="chunked",
)
TRIAL = TrialStart(trial.prepare, trial.check)
TARGET = EmitTarget(
    file=trial.CONFIG,
    emit=trl,
    yours=(
        "the data: `--dataset_name NAME` after `./launch.sh`, or `dataset_name` in trl.yaml",
        "learning rate, epochs and `output_dir`, in trl.yaml",
    ),
    predicted_for="trl",
    knows=OF_THE_ENGINE
    | OF_LORA
    | {"lora_base", "optimizer", "activations"}
    | (OF_ROLLOUT - {"rollout_sequences"}),
)
