"""Corpora: a user's data, tokenised by a process of the data plane that no other trial or training
waits for, and kept for the next time.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from threading import Event

from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.corpus import Corpus, CorpusOrder, Tokenised
from highwater.nouns.protocols import OnPhase, unheard
from highwater.nouns.trial import PHASE_FILE
from highwater.trials.reaper import module, under_reaper
from highwater.trials.trial_process import (
    ON_THE_CPU,
    clean_environment,
    exit_code_of,
    failed,
    private_folder,
)
from highwater.units import MOST_SECONDS

_TOKENISATION = "highwater.engine.data.tokenise"


def corpus_directory(environment: Mapping[str, str]) -> Path:
    """The folder of corpora: ``$XDG_CACHE_HOME/highwater/corpora``, by default in ``~/.cache``."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "highwater", "corpora")


def tokenised(
    order: CorpusOrder,
    *,
    parent: Path | None = None,
    on_phase: OnPhase = unheard,
    ended: Event | None = None,
) -> Corpus:
    """The corpus of an order, made where it is not there yet, in ``parent`` or with all others;
    blocks until it is.

    Raises what the process refused, and MachineError where it failed. When ``ended`` is set, the
    process is ended and TrialEndedError raised.
    """
    elsewhere = "name another folder: `export XDG_CACHE_HOME=/path`"
    if parent is not None:
        elsewhere = "use another `--output`"
    parent = parent or corpus_directory(os.environ)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with private_folder(parent, kind="corpus-") as folder:
            answer = _answer(order, parent, folder, on_phase, ended or Event())
    except OSError as error:
        raise MachineError(
            f"no corpus can be made in {parent}: {error}",
            hint=f"make room there, or {elsewhere}",
        ) from error
    if answer.corpus is not None:
        return answer.corpus
    kind = MachineError if answer.is_machine else UsageError
    raise kind(answer.refused.problem, hint=answer.refused.hint)


def _answer(
    order: CorpusOrder, parent: Path, folder: Path, on_phase: OnPhase, ended: Event
) -> Tokenised:
    """Run the process to its end; nothing of it runs any more when this returns or raises."""
    source, target, log = folder / "order.json", folder / "answer.json", folder / "log"
    source.write_text(to_json(order), encoding="utf-8")
    with log.open("wb") as talk:
        command = module(_TOKENISATION, str(source), str(target), str(parent))
        process = subprocess.Popen(
            under_reaper(command, inherit=[folder]),
            env=clean_environment("native") | ON_THE_CPU,
            stdin=subprocess.DEVNULL,
            stdout=talk,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = exit_code_of(
            process,
            timeout_s=MOST_SECONDS,
            ended=ended,
            tell=lambda: on_phase(_phase(folder / PHASE_FILE)),
        )
    if status != 0 or not target.is_file():
        raise failed("the data could not be tokenised", log, status)
    return from_json(target.read_bytes(), Tokenised)


def _phase(file: Path) -> str:
    """What the process last said that it does."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return "starting to read the data"
