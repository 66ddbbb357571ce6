"""Recommendation: the simplest settings that train a length on some GPUs, why simpler ones fail,
what more memory-saving ones cost; and the query for it, by number of GPUs and length.
"""

from typing import Any, Literal

from highwater.model.rope import Yarn
from highwater.nouns.capacities import Source
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import Record
from highwater.nouns.declaration import words_of
from highwater.nouns.objective import Rollout
from highwater.nouns.study import Cell, Risk
from highwater.nouns.trainer import OURS, AnyTrainer, TrainerName
from highwater.units import counted

Aim = Literal["simplest", "fastest", "lightest"]
"""The aim of a recommendation, among all settings that train the length."""
AlternativeKind = Literal["more GPUs", "a larger GPU", "more host memory", "technique"]


class StepTime(Record, frozen=True, kw_only=True):
    """Time of one training step, and tokens per second; measured in a trial, or predicted."""

    time_s: float
    source: Source
    """``measured`` at this length; ``predicted`` by another trial's FLOP/s, or without a trial."""
    step_tokens: int
    """Tokens of that step: every micro-batch of every data-parallel rank."""
    tokens_per_s: float
    """Tokens per second, over all GPUs: the trial's, or without one this step's."""
    measured_length_tokens: int | None
    """Length of the trial that the time was measured in; None where there is none."""


class Candidate(Record, frozen=True, kw_only=True):
    """One cell (settings on a layout) of a recommendation: whether the length fits there."""

    cell: Cell
    is_lowered: bool
    """True if the token budget is below the default: more micro-batches of fewer sequences."""
    token_budget_tokens: int
    """Tokens of a micro-batch for each GPU: ``ceil(sequences x length / context degree)``."""
    fits: bool
    """True if it fits; predicted, whether it leaves the headroom in question and the upper end of
    its interval is below the GPU's memory. Where no candidate does, the roomiest that may fit is
    taken for one, and its ``risk`` says so."""
    risk: Risk | None = None
    """Predicted: how sure it is to fit; None: by the prediction itself it does not."""
    source: Source
    """Source of ``fits``."""
    found_in: str
    """The study's file, or the command that predicts it."""
    is_memory_only: bool = False
    """True if it was measured by a memory-only trial, and nobody trained it in full."""
    headroom_bytes: int | None
    """Bytes that a GPU has left, at least; below 0: what it lacks; None: unknown."""
    peak_bytes: int | None = None
    """Predicted: bytes of a GPU that the step needs at its peak; None: nobody predicted it."""
    headroom_length_tokens: int | None = None
    """Measured: length of the trial with that headroom: this, or a longer one that leaves less."""
    lacks_bytes: int | None = None
    """Bytes missing of the memory in ``lacks_of``, at least if measured; None: fits, or unknown."""
    lacks_of: Literal["device", "host"] | None = None
    host_bytes: int | None = None
    """Host memory that it takes, predicted; None: unknown."""
    rollout_sequences: int | None = None
    """Predicted: sequences of this length that the rollout holds at once; None: no rollout."""
    capacity_tokens: int
    """The longest length that fits; 0: none on the grid does."""
    likely_tokens: int = 0
    """Predicted, if no length leaves the headroom: the longest that may fit."""
    likely_risk: Risk | None = None
    """How sure that one is to fit; None: a length leaves the headroom, or none may fit."""
    capacity_source: Source
    is_at_least: bool = False
    """True if the capacity is this or more: nothing longer was tried, or memory did not end it."""
    step_time: StepTime | None = None
    """None: this cell was not timed, and the speed of such GPUs is unknown."""

    @property
    def label(self) -> str:
        """Settings and layout in words; with the number of sequences if fewer than by default."""
        if not self.is_lowered:
            return self.cell.label
        sequences = counted(self.cell.settings.sequences_per_micro_batch, "sequence")
        return f"{self.cell.label}, {sequences} a micro-batch"

    @property
    def order(self) -> tuple[int, ...]:
        """Key that sorts candidates, the simplest first; fewer sequences come before offload."""
        return simplicity(self.cell)


class Alternative(Record, frozen=True, kw_only=True):
    """A change predicted to make the length fit where no requested candidate does."""

    kind: AlternativeKind
    what: str
    """``8 x H20-96GB``, in words."""
    how_many: str = ""
    """For more GPUs: ``5 x H20-96GB are the fewest that do safely (4 is tight)``; else empty."""
    flags: tuple[str, ...] = ()
    """Flags to type in the place of those typed; empty: there are none."""
    without: tuple[str, ...] = ()
    """Flags to leave out."""
    label: str | None = None
    """Label of the simplest cell that fits then; None: unknown."""
    cell: Cell | None = None
    """That cell."""
    headroom_bytes: int | None = None
    host_bytes: int | None = None
    """Host memory that the cell takes."""


class FileChange(Record, frozen=True, kw_only=True):
    """One change of the user's own trainer file, or of the environment, and what it frees."""

    words: str
    """In the trainer's own keys, for example ``micro_batch_size: 1``, between backticks."""
    frees_bytes: int | None
    """Bytes of a GPU's peak that it frees, made alone; None: without it nothing is predicted."""


class Recommendation(Record, frozen=True, kw_only=True):
    """All cells of a question judged at one length, the simplest first, and the one to use."""

    schema_version: int = 1
    model_name: str
    native_length_tokens: int
    trainer: AnyTrainer
    length_tokens: int
    gpus: int
    """GPUs of the trainer."""
    rollout_gpus: int = 0
    """GPUs set aside for rollout; the candidates do not have them."""
    rollout: Rollout | None = None
    """The rollout by vLLM, if any."""
    device_name: str
    device_bytes: int
    """Memory of one GPU, as its driver reports it."""
    reserved_bytes: int = 0
    """Bytes of it that others take."""
    host_memory_bytes: int | None = None
    """Memory of the machine; None: unknown, and no limit."""
    usual_host: str | None = None
    """The machine that usually has such GPUs, if its memory is taken as nobody named any."""
    margin_bytes: int = 0
    """Headroom that was asked for."""
    default_sequences: int
    """Sequences a micro-batch that the default token budget holds."""
    aim: Aim = "simplest"
    """The aim that the candidates are sorted by."""
    chosen: Candidate | None
    """The first candidate that fits; None: none does."""
    candidates: tuple[Candidate, ...]
    own_file: str | None = None
    """Name of the user's own file of a trainer, where one was read."""
    as_written: Candidate | None = None
    """What that file says, where it does not fit in any environment; None: it does, or nothing."""
    changes: tuple[FileChange, ...] = ()
    """The fewest changes that make the chosen of it, by what each frees; last the required ones."""
    yarn: Yarn | None
    """None: the length needs no scaling of the positions."""
    assumed: str = ""
    """Sentence on what is assumed of the trainer's attention; empty: what it does by itself."""
    alternatives: tuple[Alternative, ...] = ()
    """Changes that would train the length safely; empty where a candidate does."""
    accuracy: str
    """Known errors of such predictions, in words."""
    unlike: tuple[str, ...] = ()
    """Settings that are predicted, though no recorded trial had them."""
    not_modelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def earlier(self) -> tuple[Candidate, ...]:
        """The candidates simpler than the chosen one, none of which fits; all if none is chosen."""
        if self.chosen is None:
            return self.candidates
        return self.candidates[: self.candidates.index(self.chosen)]

    @property
    def later(self) -> tuple[Candidate, ...]:
        """The candidates after the chosen one, which save more memory."""
        if self.chosen is None:
            return ()
        return self.candidates[self.candidates.index(self.chosen) + 1 :]


class Query(Record, frozen=True, kw_only=True):
    """Model, GPUs and settings of a study or prediction, to ask ``recommend`` about them."""

    model: str
    """Catalog name, or directory."""
    kind: str | None
    """Kind of GPUs in the catalog; None: this machine's, or any with ``gpu_memory_bytes``."""
    gpu_memory_bytes: int | None = None
    """Memory of one GPU, where it is not the catalog's."""
    reserved_bytes: int = 0
    trainer: TrainerName = OURS
    studies: tuple[str, ...] = ()
    """Files whose trials are taken as measured."""
    settings: tuple[tuple[str, str | int | bool], ...] = ()
    """Fields of ``Request``, and their values, that all cells share and that are not defaults."""

    def arguments(self, *, gpus: int) -> dict[str, Any]:
        """The query as keywords of ``recommend`` for ``gpus`` GPUs, without the length."""
        limits = {"gpu_memory": self.gpu_memory_bytes, "reserved": self.reserved_bytes or None}
        return {
            "model": self.model,
            "gpus": str(gpus) if self.kind is None else f"{gpus}x{self.kind}",
            "trainer": self.trainer,
            **{name: str(value) for name, value in limits.items() if value is not None},
            **dict(self.settings),
            **({"studies": self.studies} if self.studies else {}),
        }

    def words(self, *, gpus: int, length_tokens: int) -> tuple[str, ...]:
        """Words to type after ``highwater`` that ask this query for ``gpus`` GPUs and a length."""
        asked = self.arguments(gpus=gpus)
        studies = asked.pop("studies", ())
        if asked["trainer"] == OURS:
            del asked["trainer"]
        words = ["highwater", "recommend", str(asked.pop("model"))]
        for name, value in asked.items():
            words += words_of({name: value})
        words += ["--length", str(length_tokens), *(["--study", *studies] if studies else [])]
        return tuple(words)
