"""TRL, which accelerate launches: a configuration (words.py), trials (trial.py), and the memory of
a step (law.py).
"""

from highwater.memory.trainers import TrainerMemory
from highwater.nouns.trainer import OF_FINETUNERS, SHARED, ForeignTraits, TrainerTraits
from highwater.nouns.trial import PROMPT_TOKENS
from highwater.trainers.foreign import TrialStart
from highwater.trainers.targets import OF_LORA, OF_THE_ENGINE, EmitTarget
from highwater.trainers.trl import law, trial
from highwater.trainers.trl.words import trl

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
        )
    ),
    traces="none",
    ring_objectives=frozenset(("sft",)),
    targets=("trl", "accelerate"),
)
MEMORY = TrainerMemory(
    formula=law.footprint,
    accuracy=law.ACCURACY,
    residuals=law.bundled_edges,
    learn=lambda study, _: law.study_edges(study),
    fixed_fields=lambda _: {
        "loss": "chunked",
        "allocator": "expandable",
        "prompt_tokens": PROMPT_TOKENS,
    },
    refuse=trial.refuse_unwritten,
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
    knows=OF_THE_ENGINE | OF_LORA | {"lora_base", "optimizer"},
)
