"""Inputs of a training or a trial: corpora and model directories, which a job of the data plane
makes and a cache keeps, and model files that other machines need.
"""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from highwater.errors import MachineError
from highwater.model.model import load_model
from highwater.nouns.codec import Record
from highwater.nouns.corpus import (
    Corpus,
    CorpusOrder,
    DocumentOrder,
    PreparationOrder,
    Prepared,
    missing_files,
    prepared_name,
)
from highwater.nouns.trial import OnPhase, TrialSpec, unheard
from highwater.trials.job import Job
from highwater.trials.probe import probe, refuse_package_obstacles
from highwater.trials.trial_process import (
    ON_THE_CPU,
    cache_directory,
    clean_environment,
    private_folder,
)
from highwater.units import MIB, MOST_SECONDS, format_bytes

_PREPARE_S = 3600.0
"""Longest time of a preparation: writing random weights of 70 billion parameters takes minutes."""
_BF16_BYTES = 2
_ELSEWHERE = "name another folder: `export XDG_CACHE_HOME=/path`"


def tokenised(
    order: CorpusOrder,
    *,
    parent: Path | None = None,
    on_phase: OnPhase = unheard,
    ended: Event | None = None,
) -> Corpus:
    """Tokenise a corpus in ``parent`` (default: the cache) unless it exists; blocks until done.
    Raises its process's refusal, MachineError if it failed, TrialEndedError once ``ended`` is set.
    """
    refuse_package_obstacles(probe(), before="no data can be tokenised here: ")
    elsewhere = _ELSEWHERE if parent is None else "use another `--output`"
    parent = parent or cache_directory("corpora")
    job = Job(
        module="highwater.engine.data.tokenise",
        order=order,
        words=(str(parent),),
        report=Corpus,
        environment=clean_environment("native") | ON_THE_CPU,
        timeout_s=MOST_SECONDS,
        first_phase="starting to read the data",
        failure="the data could not be tokenised",
    )
    problem = f"no corpus can be made in {parent}"
    with _room(parent, kind="corpus-", problem=problem, elsewhere=elsewhere) as folder:
        return job.run(folder, ended=ended, on_phase=on_phase)


def prepared_model(
    spec: TrialSpec, ended: Event, on_phase: OnPhase, documents: DocumentOrder | None = None
) -> Path:
    """The model directory to train from; ``documents``, if any, are written first. Starts no
    process if the directory exists and no documents are asked for. Raises the preparing process's
    own refusal, and MachineError if it failed or the disk is full.
    """
    refuse_full_disk(spec)
    there = _existing(spec)
    if there is not None and documents is None:
        return there
    cache = cache_directory("models")
    order = PreparationOrder(
        model_directory=spec.model_directory,
        cache_directory=str(cache),
        documents=documents,
        seed=spec.seed,
    )
    job = Job(
        module="highwater.engine.training.trainer_keywords",
        order=order,
        report=Prepared,
        environment=clean_environment("native") | ON_THE_CPU,
        timeout_s=_PREPARE_S,
        first_phase="preparing",
        failure="what is trained on could not be prepared",
    )
    problem = "the model to train from could not be prepared"
    with _room(cache, kind="model-", problem=problem) as folder:
        return Path(job.run(folder, ended=ended, on_phase=on_phase).model_directory)


@contextmanager
def _room(parent: Path, *, kind: str, problem: str, elsewhere: str = _ELSEWHERE) -> Generator[Path]:
    """Context manager: a temporary folder below ``parent``; MachineError if it cannot be made."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with private_folder(parent, kind=kind) as folder:
            yield folder
    except OSError as error:
        raise MachineError(
            f"{problem}: {error}", hint=f"make room there, or {elsewhere}"
        ) from error


def refuse_full_disk(spec: TrialSpec) -> None:
    """Raise MachineError if random weights must be written and the disk is too full for them."""
    if not missing_files(Path(spec.model_directory)).weights or _existing(spec) is not None:
        return
    cache = cache_directory("models")
    needed_bytes = _BF16_BYTES * load_model(spec.model_directory).shape.parameters
    place = next(each for each in (cache, *cache.parents) if each.is_dir())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise MachineError(
            f"{spec.model_name} has no weights here: random ones take "
            f"{format_bytes(needed_bytes)}, and {cache} has {format_bytes(free_bytes)} free",
            hint="name a folder with room: `export XDG_CACHE_HOME=/path`",
        )


def _existing(spec: TrialSpec) -> Path | None:
    """The model's own directory if complete, else its completed copy in the cache, else None."""
    source = Path(spec.model_directory)
    missing = missing_files(source)
    if not any(missing):
        return source
    made = cache_directory("models") / prepared_name(source, spec.seed, missing)
    return made if made.is_dir() else None


_MOST_SENT_BYTES = 32 * MIB
"""Largest size of files that are sent: a configuration with its tokenizer fits, weights do not."""


class ModelFiles(Record, frozen=True, kw_only=True):
    """Names and sizes of a model's files, so that other machines can be sent them."""

    directory: str
    sizes: dict[str, int]
    """Size of each file in bytes, by its name."""
    contents: dict[str, bytes] | None = None
    """Content of each file; None if together they are too large to be sent."""

    def missing(self) -> str | None:
        """A sentence on a file that this machine lacks; None if it has all or is sent them."""
        if self.contents is not None:
            return None
        folder = Path(self.directory)
        for name, size in self.sizes.items():
            path = folder / name
            if not path.is_file():
                return f"it has no {path}"
            if path.stat().st_size != size:
                return f"its {path} is another file"
        return None

    def placed(self, folder: Path) -> Path:
        """The directory with the model: its own, or ``folder`` after writing sent files there."""
        if self.contents is None:
            return Path(self.directory)
        folder.mkdir(parents=True)
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)
        return folder

    @property
    def way(self) -> str:
        """Sentence on how nodes get the model: from a shared path, or sent."""
        if self.contents is None:
            return f"{self.directory} is read on each node, as a path that all share"
        return "the files of the model are sent to the nodes"


def model_files(directory: Path) -> ModelFiles:
    """List a model's files, without those in subfolders."""
    paths = [path for path in sorted(directory.iterdir()) if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in paths}
    contents = None
    if sum(sizes.values()) <= _MOST_SENT_BYTES:
        contents = {path.name: path.read_bytes() for path in paths}
    return ModelFiles(directory=str(directory), sizes=sizes, contents=contents)
