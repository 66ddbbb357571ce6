"""TRL's edges: those of its recorded trials, which come along, and those of a study of it."""

from importlib.resources import files

from highwater.errors import UsageError
from highwater.memory.formula.breakdown import Footprint
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.memory.interval.edges import edge_residuals
from highwater.memory.interval.residuals import Residual, leave_out
from highwater.memory.trl.step_bytes import footprint
from highwater.nouns.codec import from_json
from highwater.nouns.study import Study
from highwater.nouns.trial import TrialSpec

_TRAINER = "trl"


def bundled_edges() -> tuple[Residual, ...]:
    """The edges that come along: ``edges.json`` beside this file, which
    docs/results/other_trainers/edges.py makes.
    """
    text = (files("highwater.memory.trl") / "edges.json").read_bytes()
    return from_json(text, tuple[Residual, ...])


def study_edges(study: Study) -> tuple[Residual, ...]:
    """The edges of a study of TRL.

    Raises UsageError for a study of another trainer, and for one that teaches nothing; ModelError
    for a family that the formula does not know.
    """
    foreign, shape = study.question.foreign, study.question.model.shape
    if foreign is None or foreign.trainer != _TRAINER:
        title = "this package's engine" if foreign is None else foreign.title
        raise UsageError(
            f"{study.path} is of trials of {title}: predictions are about TRL",
            hint=leave_out(study),
        )
    refuse_unknown_family(study.question.model)

    def footprint_of(spec: TrialSpec) -> Footprint:
        return footprint(
            shape, spec.settings, spec.layout, length_tokens=spec.length_tokens, device=spec.device
        )

    return edge_residuals(study, footprint_of)
