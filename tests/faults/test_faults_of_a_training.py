"""Faults of a training: whatever ends a run, it says what happened, and it goes on."""

import json
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import psutil
import pytest

pytest.importorskip("torch", reason="the data plane needs the train extra")

from processes import are_gone, is_arrived, marked, wait_until
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import highwater
from fork_server import ForkServer, Started
from highwater.engine.data.store import check_files, read_manifest, record_of, write_manifest
from highwater.errors import EXIT_ANSWERED, EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_TERMINATED
from highwater.nouns.training import TrainingResult
from highwater.units import MIB
from tiny_models import SMALLEST, write_model

pytestmark = pytest.mark.timeout(600)

STEPS = 16
BEST, LAST = "step-000002", f"step-{STEPS:06}"
WORDS = ("river", "stone", "bird", "seven", "green", "cloud")
BROKEN = 26
"""Line of the data with a sign that no other line has."""
SIGN = "~"
LATER = 2
"""A seed whose order of the data has that line after the first step."""
INTERMEDIATE_SIZE = 1200
"""Of 256 tokens a tensor has more than 1 MiB: it is the system's again as soon as it is freed, and
each step asks anew."""
SAME_BUT_FOR_SUMS = 1e-5
"""Float32 sums over rows, in another order."""
WITHIN_S = 200
LONG_ROW = 2048


class Trained(NamedTuple):
    """What every test begins with: data, a model, and a run of it that nothing ended."""

    model: Path
    data: Path
    held_out: Path
    run: Path
    cache: Path

    @property
    def losses(self) -> list[float]:
        return losses_of(self.run)

    def words(self, output: str, *more: str) -> list[str]:
        named = ("--data", str(self.data), "--output", output, "--steps", str(STEPS), *more)
        how = "--length 256 --rows 4 --learning-rate 1e-3 --device cpu --memory 2GiB --save-every 1"
        return ["highwater", "train", str(self.model), *how.split(), *named]

    def train(self, output: Path, **changes: Any) -> TrainingResult:
        asked: dict[str, Any] = {
            "model": str(self.model),
            "data": str(self.data),
            "length": 256,
            "steps": STEPS,
            "learning_rate": 1e-3,
            "rows": 4,
            "device": "cpu",
            "memory": "2GiB",
        }
        named: Any = asked | {"output": output} | changes
        return highwater.train(**named)


@pytest.fixture(scope="module")
def uninterrupted(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose evaluation is the best after its second step: that checkpoint is kept, too."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    trained = Trained(*(folder / name for name in ("tiny", "data.jsonl", "held", "run", "cache")))
    texts = [" ".join(WORDS[n * n % (k + 2) % 6] for n in range(3 + k % 50)) for k in range(60)]
    texts[BROKEN - 1] = f"one {SIGN} among the others"
    trained.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trained.held_out.mkdir()
    (trained.held_out / "held.jsonl").write_text(json.dumps({"text": "QZXJKWVPYHMB" * 4}))
    write_model(
        trained.model,
        SMALLEST,
        vocab_size=259,
        intermediate_size=INTERMEDIATE_SIZE,
        tie_word_embeddings=False,
    )
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(trained.cache),
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    more = ("--eval-data", str(trained.held_out), "--eval-every", "2")
    words = trained.words(str(trained.run), *more)
    assert fork_server.popen_of_commands(words, env=environment).wait(WITHIN_S) == EXIT_ANSWERED
    assert checkpoints_of(trained.run) == [BEST, LAST]
    return trained


@pytest.fixture
def trained(mark: str, uninterrupted: Trained, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setenv("XDG_CACHE_HOME", str(uninterrupted.cache))
    return uninterrupted


class Frozen(NamedTuple):
    """A run that stands still in its midst."""

    command: "subprocess.Popen[str]"
    rank: psutil.Process
    step: int
    """Of its last checkpoint."""

    def tell(self, number: signal.Signals) -> None:
        self.command.send_signal(number)
        told = partial(is_arrived, self.rank.pid, signal.SIGTERM)
        assert wait_until(lambda: not told(), within_s=WITHIN_S)

    def end(self) -> tuple[int, str]:
        _, said = self.command.communicate(timeout=WITHIN_S)
        assert "Traceback" not in said
        lines = [line for line in said.splitlines() if line]
        assert len(lines) == len(set(lines)), "nothing is said twice"
        return self.command.returncode, said


def frozen(trained: Trained, mark: str, output: Path, *more: str, is_forked: bool = True) -> Frozen:
    before = latest_of(output)
    start, pipe = subprocess.Popen if is_forked else Started, subprocess.PIPE
    command = start(trained.words(str(output), *more), stdout=pipe, stderr=pipe, text=True)
    assert wait_until(lambda: latest_of(output) > before, within_s=WITHIN_S)
    (rank,) = (
        process
        for pid in marked(mark)
        if "highwater.engine.training.worker" in (process := psutil.Process(pid)).cmdline()
        and "highwater.trials.reaper" not in process.cmdline()
    )
    rank.suspend()
    assert wait_until(lambda: rank.status() == psutil.STATUS_STOPPED, within_s=WITHIN_S)
    step = latest_of(output)
    assert step < STEPS
    return Frozen(command, rank, step)


def checkpoints_of(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoints/step-*[0-9]"))


def latest_of(run: Path) -> int:
    return max((int(name[5:]) for name in checkpoints_of(run)), default=0)


def losses_of(run: Path) -> list[float]:
    name = checkpoints_of(run)[-1]
    return json.loads((run / "checkpoints" / name / "state.json").read_text())["losses"]


def flag_in(hint: str, flag: str) -> str:
    found = re.search(rf"{flag} ([^\s`]+)", hint)
    assert found is not None, hint
    return found[1]


def test_whatever_ends_a_run_it_goes_on_as_if_it_never_was(trained, mark, tmp_path):
    run = tmp_path / "run"

    killed = frozen(trained, mark, run)
    with pytest.raises(highwater.HighwaterError, match="a training writes into") as second:
        trained.train(run)
    assert flag_in(second.value.hint, "--output") == f"{run}-2"
    killed.command.kill()
    killed.command.communicate(timeout=WITHIN_S)
    assert are_gone(mark)
    assert latest_of(run) == killed.step

    told = frozen(trained, mark, run, "--resume-from", f"step-{killed.step:06}")
    told.tell(signal.SIGTERM)
    told.rank.resume()
    code, said = told.end()
    stopped_at = latest_of(run)
    assert code == EXIT_TERMINATED
    assert f"stopped after step {stopped_at} of {STEPS}" in said
    assert f"next: {shlex.join(trained.words(str(run)))}  (goes on" in said
    assert told.step <= stopped_at < STEPS

    impatient = frozen(trained, mark, run)
    impatient.tell(signal.SIGINT)
    assert impatient.command.poll() is None, "its rank has not saved yet"
    impatient.command.send_signal(signal.SIGINT)
    code, said = impatient.end()
    assert code == EXIT_INTERRUPTED
    assert f"stopped after step {impatient.step} of {STEPS}" in said
    assert marked(mark) == []

    # Of the memory that a fork shares nothing is free, so that Python's own objects run out first.
    again = ("--resume-from", f"step-{latest_of(run):06}")
    starved = frozen(trained, mark, run, *again, is_forked=False)
    _, most = resource.prlimit(starved.rank.pid, resource.RLIMIT_DATA)
    resource.prlimit(starved.rank.pid, resource.RLIMIT_DATA, (MIB, most))  # 0 means nothing here
    starved.rank.resume()
    code, said = starved.end()
    assert code == EXIT_MACHINE
    assert "error: the training ran out of memory: rank 0, " in said
    then = f"the same command without `--resume-from` goes on after step {latest_of(run)}"
    assert f"`--memory` than 2.00 GiB; {then}" in said

    done = subprocess.run(trained.words(str(run)), capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == EXIT_ANSWERED, done.stderr
    assert losses_of(run) == trained.losses
    weights, expected = (folder / "model" / "model.safetensors" for folder in (run, trained.run))
    assert weights.read_bytes() == expected.read_bytes()
    lines = map(json.loads, (run / "statistics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))


def test_a_run_whose_terminal_closes_leaves_a_checkpoint_or_goes_on(trained, mark, tmp_path):
    run = tmp_path / "closed"
    terminal, theirs = pty.openpty()
    _, *words = trained.words(str(run), "--steps", "4000")
    closed = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("own_terminal.py"), *words],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
    )
    os.close(theirs)
    Thread(target=_read_on, args=(terminal,), daemon=True).start()
    assert wait_until(lambda: latest_of(run) >= 2, within_s=WITHIN_S)
    os.killpg(closed.pid, signal.SIGHUP)  # as the kernel does
    os.close(terminal)
    assert closed.wait(WITHIN_S) == EXIT_TERMINATED
    assert marked(mark) == []
    assert len(losses_of(run)) == latest_of(run) >= 2

    unheard = tmp_path / "unheard"
    command = subprocess.Popen(trained.words(str(unheard)), stderr=subprocess.PIPE)
    command.stderr.readline()
    command.stderr.close()
    assert command.wait(timeout=WITHIN_S) == EXIT_ANSWERED
    assert losses_of(unheard) == trained.losses


def _read_on(terminal: int) -> None:
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass


def test_a_run_goes_on_with_two_processes_and_has_the_same_curve(trained, tmp_path):
    run = Path(shutil.copytree(trained.run, tmp_path / "two"))
    result = trained.train(run, gpus=(2,), rows=None, resume_from=BEST)
    assert result.status == "done"
    assert result.losses == pytest.approx(trained.losses, abs=SAME_BUT_FOR_SUMS)
    assert result.losses != tuple(trained.losses), "it was trained once more"
    assert result.model_directory == str(run / f"model-{STEPS}")


def test_a_run_without_a_checkpoint_begins_anew_and_so_do_its_statistics(trained, tmp_path):
    run = Path(shutil.copytree(trained.run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "model")
    assert list(trained.train(run).losses) == trained.losses
    lines = map(json.loads, (run / "statistics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"data": "more.jsonl"}, "the data is another", id="data"),
        pytest.param({"learning_rate": 1e-4}, "--learning-rate: 0.001 .* 0.0001 now", id="rate"),
        pytest.param({"length": 128}, "--length: 256 .* 128 now", id="length"),
        pytest.param({"seed": 1}, "--seed: 0 .* 1 now", id="seed"),
        pytest.param({"rows": 2}, "--rows: 4 .* 2 now", id="rows"),
        pytest.param({"steps": 8}, f"has done {STEPS} steps", id="steps"),
    ],
)
def test_another_training_than_the_folders_is_refused_and_named(trained, tmp_path, changes, named):
    (tmp_path / "more.jsonl").write_text(trained.data.read_text() + '{"text": "one more"}\n')
    before = sorted(trained.run.rglob("*"))
    with pytest.raises(highwater.HighwaterError, match=named) as refused:
        trained.train(trained.run, **changes)
    assert flag_in(refused.value.hint, "--output") == f"{trained.run}-2"
    assert sorted(trained.run.rglob("*")) == before


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(trained, tmp_path):
    run = Path(shutil.copytree(trained.run, tmp_path / "run"))
    (shard,) = (run / "checkpoints" / LAST / "model").glob("*.distcp")
    numbers = bytearray(shard.read_bytes())
    numbers[len(numbers) // 2] ^= 1
    shard.write_bytes(numbers)
    with pytest.raises(highwater.HighwaterError, match=shard.name) as refused:
        trained.train(run, steps=STEPS + 2)
    assert LAST in refused.value.problem
    goes_on_from = flag_in(refused.value.hint, "--resume-from")
    assert goes_on_from == BEST

    longer = trained.train(run, steps=STEPS + 2, resume_from=goes_on_from)
    assert longer.status == "done"
    assert list(longer.losses[:STEPS]) == trained.losses
    assert longer.model_directory == str(run / f"model-{STEPS + 2}")
    assert (run / "model" / "model.safetensors").exists(), "the one before stays"

    log = (run / "training.log").read_bytes()
    again = trained.train(run, steps=STEPS + 2)
    answers = [(each.status, each.losses, each.model_directory) for each in (longer, again)]
    assert answers[0] == answers[1]
    assert (run / "training.log").read_bytes() == log, "nothing was started"


@pytest.fixture
def corpus(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data's folder of tokens, in a cache of the test's own."""
    cache = Path(shutil.copytree(trained.cache, tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    decided = json.loads((trained.run / "training.json").read_text())
    return cache / Path(decided["corpus"]["directory"]).relative_to(trained.cache)


def test_ids_that_the_model_does_not_know_are_refused_before_a_step(trained, corpus, tmp_path):
    ids = corpus / "ids.bin"
    ids.write_bytes(ids.read_bytes()[:-2] + (259).to_bytes(2, "little"))
    write_manifest(corpus, {**read_manifest(corpus).files, ids.name: record_of(ids)})
    with pytest.raises(highwater.HighwaterError, match=r"the token id 259\b.* 0 to 258") as refused:
        trained.train(tmp_path / "run", steps=1)
    shutil.rmtree(next(iter(re.findall("`rm -r (.*)`", refused.value.hint))))
    assert trained.train(tmp_path / "run", steps=1).losses[0] == trained.losses[0]


def test_a_loss_that_is_no_number_names_its_step_and_document(trained, tmp_path):
    model = tmp_path / "granite"
    config = json.loads((trained.model / "config.json").read_text())
    granite = AutoConfig.for_model(**config | {"model_type": "granite", "embedding_multiplier": 12})
    weights = AutoModelForCausalLM.from_config(granite)
    weights.get_input_embeddings().weight.data[ord(SIGN)] = 1e38  # a number, until it is multiplied
    weights.save_pretrained(model)
    run = tmp_path / "run"
    with pytest.raises(highwater.HighwaterError) as broken:
        trained.train(run, model=str(model), save_every=1, seed=LATER)
    step = latest_of(run) + 1
    assert step > 1, "the data is in an order in which it comes later"
    assert broken.value.problem == (
        f"the loss of step {step} is nan: it broke in {trained.data.name}:{BROKEN}; "
        f"the last checkpoint is step-{step - 1:06}"
    )
    last = run / "checkpoints" / f"step-{step - 1:06}"
    manifest = read_manifest(last)
    check_files(last, manifest, manifest.files)

    lines = trained.data.read_text().splitlines(keepends=True)
    (tmp_path / "mended.jsonl").write_text("".join(lines[: BROKEN - 1] + lines[BROKEN:]))
    other = Path(flag_in(broken.value.hint, "--output"))
    mended = trained.train(other, model=str(model), data="mended.jsonl", seed=LATER, steps=step + 1)
    assert len(mended.losses) == step + 1


def test_weights_that_are_no_numbers_are_refused_before_the_first_step(trained, tmp_path):
    model = Path(shutil.copytree(trained.run / "model", tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][ord(SIGN)] = float("inf")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(highwater.HighwaterError) as refused:
        trained.train(tmp_path / "run", model=str(model), lora=8)
    assert refused.value.problem == f"{model} has weights that are no finite numbers"
    assert not latest_of(tmp_path / "run")


def test_a_learning_rate_that_breaks_the_weights_is_said_with_one_that_does_not(trained, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(highwater.HighwaterError, match="of step 2 is nan: the step had") as broken:
        trained.train(run, learning_rate=1e30, steps=3)
    assert broken.value.problem.endswith("; there is no checkpoint yet")
    rate = float(flag_in(broken.value.hint, "--learning-rate"))
    elsewhere = Path(flag_in(broken.value.hint, "--output"))
    assert len(trained.train(elsewhere, learning_rate=rate, steps=3).losses) == 3


def test_on_a_full_disk_the_last_checkpoint_stays_and_with_room_it_goes_on(trained, small_disk):
    """Somebody else fills the disk once there is a checkpoint."""
    disk = small_disk(128)
    words = trained.words("disk/run")
    training = disk.start(*words)
    first = disk.folder / "run" / "checkpoints" / "step-000001"
    assert wait_until(first.exists, within_s=WITHIN_S)
    others = disk.fill("others")
    _, said = training.communicate(timeout=WITHIN_S)
    assert training.returncode == EXIT_MACHINE, said
    found = re.search(r"error: step-(\d+) cannot be saved in .*there is no space left", said)
    assert found is not None, said
    assert f"step-{int(found[1]) - 1:06} is still there" in said
    assert "hint: make room" in said
    assert "Traceback" not in said
    others.unlink()
    done = disk.run(*words)
    assert done.returncode == 0, done.stderr
    assert f"goes on after step {int(found[1]) - 1}\n" in done.stderr
    assert losses_of(disk.folder / "run") == trained.losses


def test_a_disk_without_room_for_checkpoints_is_refused_with_one_that_has(trained, small_disk):
    done = small_disk(64).run(*trained.words("disk/run"))
    assert done.returncode == EXIT_MACHINE, done.stderr
    assert "a run needs" in done.stderr
    assert "2 checkpoints" in done.stderr
    assert Path(flag_in(done.stderr, "--output")).parent.is_dir()


def test_the_rows_of_a_step_take_no_more_than_is_predicted_of_them(trained, tmp_path):
    """The peaks of steps of 2 and of 64 rows, which differ by what waits for its turn."""
    config = json.loads((trained.model / "config.json").read_text()) | {"intermediate_size": 64}
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.json").write_text(json.dumps(config))
    text = json.dumps({"text": "ab" * (LONG_ROW // 2 - 1)}) + "\n"
    (tmp_path / "long.jsonl").write_text(text * 64)
    few, many = (
        trained.train(
            tmp_path / f"rows-{rows}",
            model=str(tmp_path / "small"),
            data=str(tmp_path / "long.jsonl"),
            length=LONG_ROW,
            rows=rows,
            steps=1,
            loss="chunked",
        ).peak_bytes
        for rows in (2, 64)
    )
    counted = 200 * LONG_ROW * 62
    assert counted / 2 < many - few < counted
