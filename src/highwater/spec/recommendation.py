"""Recommendation: the simplest settings that train a length on some GPUs, why simpler ones do not, and what the next would buy."""

from typing import Literal

from highwater.spec.capacities import Source
from highwater.spec.codec import Noun
from highwater.spec.events import Trainer
from highwater.spec.ladder import simplicity
from highwater.spec.rope import Yarn
from highwater.spec.study import Cell
from highwater.units import counted

RemedyKind = Literal["more GPUs", "a larger GPU", "technique"]


class StepTime(Noun, frozen=True, kw_only=True):
    """How long a step takes, from a trial whose speed was measured."""

    time_s: float
    source: Source
    """``measured`` at this very length; ``predicted`` from another one at the same FLOP/s."""
    step_tokens: int
    """Tokens of that step: every micro-batch of every data-parallel rank."""
    tokens_per_s: float
    """Measured, over all GPUs."""
    measured_length_tokens: int
    """Length of the trial that it was measured in."""


class Candidate(Noun, frozen=True, kw_only=True):
    """One cell at the length asked."""

    cell: Cell
    is_lowered: bool
    """Its token budget is below the default: fewer sequences a micro-batch, so more micro-batches for as many sequences."""
    token_budget_tokens: int
    """Tokens of a micro-batch for each GPU: ``ceil(sequences x length / context degree)``."""
    fits: bool
    """Predicted: the upper end of the interval fits."""
    source: Source
    """Who says so."""
    found_in: str
    """The study's file, or the command that predicts it."""
    is_memory_only: bool = False
    """Measured: memory holds it, and nobody trained it in full."""
    headroom_bytes: int | None
    """What a GPU has left, at least; below 0: what it lacks; None: nobody knows."""
    headroom_length_tokens: int | None = None
    """Measured: length of the trial whose headroom that is, this one or a longer one, which leaves no more."""
    lacks_bytes: int | None = None
    """What is missing of the memory that ends it, measured at least; None where it fits, or where nobody knows."""
    lacks_of: Literal["device", "host"] | None = None
    host_bytes: int | None = None
    """Host memory that it takes, predicted; None: nobody knows."""
    capacity_tokens: int
    """The longest length that fits; 0: none on the grid does."""
    capacity_source: Source
    is_at_least: bool = False
    """Nothing longer was tried or asked about, or it ended otherwise than by memory: the capacity is that or more."""
    step_time: StepTime | None = None
    """None: no trial of this cell had its speed measured."""

    @property
    def label(self) -> str:
        """``Env, 4 GPUs, SP=2``, and how many sequences where they are fewer than by default."""
        if not self.is_lowered:
            return self.cell.label
        return f"{self.cell.label}, {counted(self.cell.settings.sequences_per_micro_batch, 'sequence')} a micro-batch"

    @property
    def order(self) -> tuple[int, ...]:
        """Where it stands among the others, the simplest first: the ladder's order, a lowered budget right before offload."""
        offload, *others = simplicity(self.cell)
        return (offload, int(self.is_lowered), *others)


class Remedy(Noun, frozen=True, kw_only=True):
    """Predicted: what would train the length where nothing that was asked about does."""

    kind: RemedyKind
    what: str
    """``8 x H20-96GB``, in words."""
    flags: tuple[str, ...] = ()
    """To type instead of those that were typed; empty: nothing to type does it."""
    without: tuple[str, ...] = ()
    """Flags to leave out."""
    label: str | None = None
    """The first cell that fits then; None: nothing here is known to."""
    headroom_bytes: int | None = None


class Recommendation(Noun, frozen=True, kw_only=True):
    """Every cell at one length, the simplest first, and which to take."""

    schema_version: int = 1
    model_name: str
    native_length_tokens: int
    trainer: Trainer
    length_tokens: int
    gpus: int
    """The trainer's."""
    rollout_gpus: int = 0
    """Set aside for rollout; the candidates do not have them."""
    device_name: str
    device_bytes: int
    """Memory of one GPU, as its driver reports it."""
    reserved_bytes: int = 0
    """What others take of it."""
    host_memory_bytes: int | None = None
    """The machine's; None: nobody said, so it ends nothing."""
    state_bytes_per_parameter: int
    margin_bytes: int = 0
    """Headroom that was asked for."""
    default_sequences: int
    """Sequences a micro-batch that the default token budget holds."""
    chosen: Candidate | None
    """The first candidate that fits; None: none does."""
    candidates: tuple[Candidate, ...]
    yarn: Yarn | None
    """None: the length needs no scaling of the positions."""
    remedies: tuple[Remedy, ...] = ()
    """Where none fits."""
    accuracy: str
    """What is known of the errors of what is predicted."""
    unlike: tuple[str, ...] = ()
    """What is predicted and no recorded trial had."""
    not_modelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def earlier(self) -> tuple[Candidate, ...]:
        """The simpler ones, none of which fits; all of them where none does."""
        return self.candidates if self.chosen is None else self.candidates[: self.candidates.index(self.chosen)]

    @property
    def later(self) -> tuple[Candidate, ...]:
        """Those that save more."""
        return () if self.chosen is None else self.candidates[self.candidates.index(self.chosen) + 1 :]
