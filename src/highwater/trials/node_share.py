"""A machine's share of the ranks of every trial, or of a training, that the first machine says."""

import time
from contextlib import suppress
from pathlib import Path

from highwater.errors import MachineError
from highwater.nouns.codec import from_json
from highwater.nouns.training import TrainingSpec
from highwater.nouns.trial import TrialSpec
from highwater.trials.engine_trial import SPEC_FILE, RanksHere
from highwater.trials.node_folder import Done, Go, NodeFolder, NodeReady, pause
from highwater.trials.nodes import COME_S, share_of
from highwater.trials.trial_process import await_release, trial_environment


def serve(folder: NodeFolder, ready: NodeReady) -> None:
    """Start this machine's share of the ranks of each trial, until the search is over, or of the
    training.

    Raises MachineError where the machine that searches, or trains, does not come, or is lost.
    """
    if folder.is_over:
        raise MachineError(
            f"what met in {folder.path} is over", hint="name a new `--rendezvous` on every one"
        )
    folder.enter(ready)
    number, deadline = 1, time.monotonic() + COME_S
    try:
        while not folder.is_over:
            trial = folder.trial(number)
            go = folder.go(trial)
            if go is not None:
                _run_share(folder, trial, go)
                number += 1
            elif folder.ready(0) is None and time.monotonic() < deadline:
                pause()
            elif folder.ready(0) is None or folder.is_lost(0):
                raise _no_searcher(folder)
            else:
                pause()
    finally:
        folder.leave()


def _no_searcher(folder: NodeFolder) -> MachineError:
    return MachineError(
        f"no machine searches, or trains, in {folder.path}",
        hint="start it with `--node-rank 0`, on a file system that every machine shares",
    )


def _run_share(folder: NodeFolder, trial: Path, go: Go) -> None:
    """Run this machine's ranks of one trial, or of the training, until they end or are to.

    Ctrl-C and SIGTERM tell those of a training to stop, and with them all others, which save: then
    KeyboardInterrupt is raised when they have.
    """
    said = (trial / SPEC_FILE).read_bytes()
    spec = from_json(said, TrainingSpec) if go.trains else from_json(said, TrialSpec)
    one = spec.trial if isinstance(spec, TrainingSpec) else spec
    interrupt: KeyboardInterrupt | None = None
    log_path = Path(go.log_path).with_suffix(f".node-{folder.node}.log")
    with log_path.open("ab" if go.trains else "xb") as log:
        share = share_of(one, trial, folder)
        ranks = RanksHere(spec, trial, trial_environment(one), log, share=share)
        try:
            while (code := ranks.process.poll()) is None:
                if folder.is_ended(trial) or folder.is_lost(0):
                    break
                try:
                    pause()
                except KeyboardInterrupt as error:
                    if interrupt is not None or not go.trains:
                        raise
                    interrupt = error
                    ranks.stop()
        finally:
            ranks.abandon()
    if one.device == "cuda":
        await_release(None, share.count)
    with suppress(OSError):  # whoever searches may have gone, and the folder with it
        folder.say_done(trial, Done(exit_code=code, kernel_kills=ranks.kernel_kills))
    if interrupt is not None:
        raise interrupt
