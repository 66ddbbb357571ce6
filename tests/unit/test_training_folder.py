"""The folder of a run of training, as whoever starts the run sees it."""

from pathlib import Path

import pytest

from highwater.errors import UsageError
from highwater.nouns.codec import to_json
from highwater.nouns.training import CHECKPOINTS, STATE_FILE, RunState, checkpoint_name
from highwater.store.training_folder import TrainingFolder


def checkpoint(run: Path, name: str, step: int) -> Path:
    """A checkpoint's folder with its state alone."""
    path = run / CHECKPOINTS / name
    path.mkdir(parents=True)
    state = RunState(step=step, corpus_digest="c", run_digest="r")
    (path / STATE_FILE).write_text(to_json(state))
    return path


def test_a_checkpoint_that_is_half_written_or_set_aside_is_none(tmp_path):
    for step in (7, 1_000_000):
        checkpoint(tmp_path, checkpoint_name(step), step)
    for name in ("step-2000000.partial", "step-2000000.set-aside", "step-9", "step-mine"):
        checkpoint(tmp_path, name, 2_000_000)
    (tmp_path / CHECKPOINTS / "step-3000000").write_text("a file")
    folder = TrainingFolder(tmp_path)
    assert folder.checkpoint_steps() == [7, 1_000_000]
    state = folder.last_state()
    assert state is not None
    assert (state.step, folder.done_steps(None)) == (1_000_000, 1_000_000)
    assert folder.done_steps("step-000007") == 7
    folder.refuse_missing("step-000007")
    with pytest.raises(UsageError, match="no checkpoint 'step-000008'") as refused:
        folder.refuse_missing("step-000008")
    assert "`--resume-from step-1000000`" in refused.value.hint


def test_a_model_is_never_put_where_one_is(tmp_path):
    folder, taken = TrainingFolder(tmp_path), []
    for _ in range(4):
        path = folder.new_model(200)
        path.mkdir()
        taken.append(path.name)
    assert taken == ["model", "model-200", "model-200-2", "model-200-3"]


@pytest.mark.parametrize("name", ["statistics.jsonl", "checkpoints"])
def test_a_folder_that_lost_what_was_decided_is_refused_with_another(name, tmp_path):
    assert TrainingFolder(tmp_path / "new").spec() is None
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=r"without its training\.json") as refused:
        TrainingFolder(tmp_path).spec()
    assert refused.value.hint == f"use `--output {tmp_path}-2`"
