"""Notes of a training: what a user should know of it before it starts."""

from pathlib import Path

from highwater.model.model import Model, load_model
from highwater.model.rope import yarn
from highwater.nouns.corpus import Corpus, missing_files
from highwater.nouns.plan_notes import weights_notes
from highwater.nouns.training import TrainingRequest
from highwater.nouns.trial import TrialSpec
from highwater.recommendation.training_settings import ChosenTrial
from highwater.units import format_bytes, format_tokens


def training_notes(
    model: Model, chosen: ChosenTrial, corpus: Corpus, asked: TrainingRequest
) -> tuple[str, ...]:
    """All that is said of a training's settings, weights and data, a sentence each."""
    trial = chosen.spec
    return (
        *chosen.notes,
        *data_notes(chosen, corpus),
        *weights_notes(model, trial.settings, simulated=False),
        *adapter_notes(trial),
        *corpus.notes,
        *_overlap_notes(asked),
    )


def data_notes(chosen: ChosenTrial, corpus: Corpus) -> tuple[str, ...]:
    """What a corpus takes of memory that a study has not measured: its sequences began with a
    prompt, of whose tokens the full loss makes no logits, and a text is trained from its beginning.
    """
    spec, predicted = chosen.spec, chosen.predicted
    if not spec.prompt_tokens:
        return ()
    row_tokens = spec.length_tokens * spec.sequences
    prompts_tokens = min(spec.prompt_tokens, spec.length_tokens // 2) * spec.sequences
    is_prompted = corpus.trained_tokens * row_tokens <= corpus.tokens * (
        row_tokens - prompts_tokens
    )
    if spec.settings.loss != "full" or is_prompted:
        return ()
    element_bytes = 2 if spec.device == "cuda" else 4
    vocab_size = load_model(spec.model_directory).shape.vocab_size
    more_bytes = element_bytes * vocab_size * prompts_tokens // spec.layout.context_degree
    if more_bytes <= predicted.headroom_bytes:
        return ()
    return (
        f"up to {format_bytes(more_bytes)} more of logits than predicted, and "
        f"{format_bytes(predicted.headroom_bytes)} are left: this data is trained from its "
        f"beginning, a trial's sequence after a prompt of {format_tokens(prompts_tokens)} tokens; "
        "`--loss chunked` in the place of `--settings` takes none of them",
    )


def has_lost_base(trial: TrialSpec) -> bool:
    """Whether what is saved is adapters of random weights, which nobody can load: only the adapters
    are.
    """
    settings = trial.settings
    is_adapter = settings.lora is not None and not settings.lora_merged
    return is_adapter and missing_files(Path(trial.model_directory)).weights


def adapter_notes(trial: TrialSpec) -> tuple[str, ...]:
    """What adapters alone do not say of the model that they belong to."""
    settings = trial.settings
    if settings.lora is None or settings.lora_merged:
        return ()
    model = load_model(trial.model_directory)
    scaled = yarn(model, length_tokens=trial.length_tokens, rope=settings.rope)
    notes: list[str] = []
    if has_lost_base(trial):
        notes.append(
            "the adapters alone are saved, not the random weights that they belong to: "
            "`--lora-merged` saves a model that loads"
        )
    if scaled is not None:
        notes.append(
            f"the adapters alone are saved, not the YaRN of factor {scaled.factor:.4g} that they "
            "are trained with: load them on a model whose config has it, or `--lora-merged` saves "
            "one that does"
        )
    return tuple(notes)


def _overlap_notes(asked: TrainingRequest) -> tuple[str, ...]:
    """What is evaluated though it is trained on."""
    trained = [Path(path).resolve() for path in asked.data]
    both = [
        path
        for path in asked.eval_data
        if any(_is_within(Path(path).resolve(), each) for each in trained)
    ]
    if not both:
        return ()
    return (f"{', '.join(both)} of `--eval-data` is in `--data`, too: its loss is not held out",)


def _is_within(path: Path, other: Path) -> bool:
    """Whether one of two paths is, or holds, the other."""
    return path.is_relative_to(other) or other.is_relative_to(path)
