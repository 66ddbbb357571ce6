"""A training: what is typed, what is refused, its settings, its folder, and what is told of it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import highwater
from highwater.api.training import prepare_training
from highwater.cli.app import main
from highwater.cli.flags import training_request_of
from highwater.cli.grammar import parse
from highwater.cli.progress import training_progress
from highwater.cli.train import prediction_lines, training_table
from highwater.errors import EXIT_USER, MachineError, UsageError
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns import training
from highwater.nouns.codec import to_json
from highwater.nouns.request import request_from
from highwater.nouns.trial import PROMPT_TOKENS
from highwater.recommendation.training_settings import chosen_trial, data_notes, named_settings
from highwater.store.directory import TrainingFolder
from highwater.store.journal import read_study
from highwater.trials.probe import probe
from highwater.trials.training_ranks import own_folder
from highwater.units import GIB, format_bytes
from places import NO_GPU, machine_with
from tables import deep, table
from tiny_models import write_model
from trial_specs import corpus_of, training_of

MACHINE = msgspec.structs.replace(
    NO_GPU, host_memory_total_bytes=128 * GIB, host_memory_available_bytes=128 * GIB
)
STUDY = Path(__file__).parents[2] / "docs/results/other_trainers/studies/one-gpu-highwater.jsonl"


def asked(length: str | int, settings: str | None = None):
    values = {"data": ("data.jsonl",), "length": length, "steps": 10, "output": "run"}
    return training.training_request_from(
        values | ({} if settings is None else {"settings": settings})
    )


def on_the_cpu(memory: str, **named):
    fields = {"model": "Qwen3-0.6B", "device": "cpu", "memory": memory, **named}
    return request_from(fields, keywords=True)


def test_what_is_named_is_taken_and_what_is_not_is_recommended():
    named = chosen_trial(on_the_cpu("16GiB", loss="chunked"), asked(4096), MACHINE)
    assert named.spec.settings.loss == "chunked"
    usual = chosen_trial(on_the_cpu("64GiB"), asked(4096), MACHINE)
    assert usual.spec.settings.loss == "full", "the simplest that fits"
    assert usual.predicted.capacity_tokens == 4096


@pytest.mark.parametrize(
    "words", [("--objective", "dpo"), ("--objective", "rw"), ("--lora", "4", "--lora-merged")]
)
def test_pairs_and_merged_adapters_are_planned_before_any_data_is_read(words, in_a_folder, capsys):
    typed = ("train", "tiny", "--data", "none.jsonl", "--length", "64", "--device", "cpu")
    assert main([*typed, "--steps", "2", "--output", "run", *words]) == EXIT_USER
    assert "none.jsonl" in capsys.readouterr().err.splitlines()[0]


def test_the_simplest_settings_that_fit_are_recommended():
    wanted = asked(16384, "recommended")
    roomy, tight = (chosen_trial(on_the_cpu(it), wanted, MACHINE) for it in ("64GiB", "16GiB"))
    assert (roomy.spec.settings.loss, tight.spec.settings.loss) == ("full", "chunked")
    assert tight.predicted.footprint.needed_bytes < roomy.predicted.footprint.needed_bytes
    with pytest.raises(MachineError) as refused:
        chosen_trial(on_the_cpu("16GiB", loss="full"), asked(16384), MACHINE)
    assert "do not fit" in refused.value.problem
    assert "--settings recommended" in refused.value.hint
    with pytest.raises(MachineError, match="do not fit") as refused:
        chosen_trial(on_the_cpu("2GiB"), asked(16384), MACHINE)
    assert "--memory" in refused.value.hint


def chosen_with(rows: int | None, memory: str = "64GiB", loss: str = "chunked") -> Any:
    """A training of so many rows a step on the CPU."""
    wanted = msgspec.structs.replace(asked(4096), rows=rows)
    return chosen_trial(on_the_cpu(memory, loss=loss), wanted, MACHINE)


def test_the_rows_of_a_step_are_counted_where_they_lie_in_the_same_memory():
    few, many = (chosen_with(rows, loss="full") for rows in (2, 66))
    assert few.rows_bytes == 0
    assert many.rows_bytes == 64 * 4096 * 200
    enough = few.predicted.device_used_bytes + many.rows_bytes // 2
    assert chosen_with(2, f"{enough}B", "full")
    with pytest.raises(MachineError, match="do not fit"):
        chosen_with(66, f"{enough}B", "full")


def test_a_studys_answer_is_taken_for_the_length_that_it_measured():
    study = read_study(STUDY)
    (answer,) = study.answers
    request = request_from({"model": "Qwen3-4B", "gpus": [1]}, keywords=True)
    found = chosen_trial(request, asked(answer.reach_tokens, str(STUDY)), machine_with(1))
    assert found.spec.settings == answer.cell.settings
    assert found.spec.layout == answer.cell.layout
    assert found.spec.memory_budget_bytes == study.question.memory_budget_bytes == 80 * GIB
    assert any("measured up to" in note for note in found.notes)
    with pytest.raises(UsageError, match="the longest was") as refused:
        chosen_trial(request, asked(answer.reach_tokens + 4096, str(STUDY)), machine_with(1))
    assert f"--length {answer.reach_tokens}" in refused.value.hint


def test_a_study_of_whole_models_says_nothing_of_adapters_which_are_trained():
    values = {"model": "Qwen3-4B", "memory": "80GiB", "gpus": [1], "lora": 16}
    request = request_from(values, keywords=True)
    with pytest.raises(UsageError, match="was trained as it is named") as refused:
        chosen_trial(request, asked(4096, str(STUDY)), machine_with(1))
    assert "--settings recommended" in refused.value.hint
    assert named_settings(on_the_cpu("64GiB", recompute="none", lora=8)) == ("recompute",)


def test_one_row_for_each_rank_is_predicted_without_gradients_that_are_added_up():
    usual, one, two = (chosen_with(rows) for rows in (None, 1, 2))
    assert [each.spec.settings.accumulates for each in (usual, one, two)] == [True, False, True]
    assert [each.spec.micro_batches for each in (usual, one, two)] == [2, 1, 2]
    assert one.predicted.device_used_bytes < two.predicted.device_used_bytes
    assert usual.predicted.device_used_bytes == two.predicted.device_used_bytes


LENGTH = 1024
VOCABULARY = 151_936
HALF_BYTES = 4 * VOCABULARY * LENGTH // 2
"""Logits in float32 of the half of a sequence that a trial takes for a prompt."""

ROOM = {"4GiB": HALF_BYTES - 1, "8GiB": HALF_BYTES}


def notes(*, memory: str, trained_tokens: int, loss: str = "full") -> tuple[str, ...]:
    fields = {"model": "tiny", "device": "cpu", "memory": memory, "loss": loss}
    request = request_from(fields, keywords=True)
    asked = training.TrainingRequest(data=("data.jsonl",), length=LENGTH, steps=1, output="run")
    corpus = corpus_of(length_tokens=LENGTH, tokens=1000, trained_tokens=trained_tokens)
    chosen = chosen_trial(request, asked, probe())
    assert data_notes(chosen, corpus) == (), "every token is predicted to be trained"
    # A study has the headroom of its own trials: half of a sequence has no logits there.
    predicted = msgspec.structs.replace(chosen.predicted, headroom_bytes=ROOM[memory])
    measured = msgspec.structs.replace(chosen.spec, prompt_tokens=PROMPT_TOKENS)
    return data_notes(chosen._replace(spec=measured, predicted=predicted), corpus)


@pytest.mark.parametrize(
    "otherwise", [{}, {"memory": "8GiB"}, {"trained_tokens": 500}, {"loss": "chunked"}], ids=str
)
def test_texts_that_are_trained_from_their_beginning_are_noted_where_logits_lack_room(otherwise):
    """Not where there is room, a prompt or a chunked loss."""
    found = notes(**{"memory": "4GiB", "trained_tokens": 999, **otherwise})
    said = f"up to {format_bytes(HALF_BYTES)} more of logits than predicted"
    assert [note.startswith(said) for note in found] == ([] if otherwise else [True])


def test_a_prediction_of_a_training_has_the_logits_of_every_token():
    fields = {"model": "tiny", "device": "cpu", "memory": "4GiB", "loss": "full"}
    asked = training.TrainingRequest(data=("data.jsonl",), length=LENGTH, steps=1, output="run")
    chosen = chosen_trial(request_from(fields, keywords=True), asked, probe())
    spec, shape = chosen.spec, load_model(chosen.spec.model_directory).shape
    in_a_trial = likely_footprint(Step(shape, spec.settings, spec.layout, LENGTH, "cpu"))
    assert chosen.predicted.footprint.needed_bytes >= in_a_trial.needed_bytes + HALF_BYTES


ASKED: dict[str, Any] = {"data": ("data.jsonl",), "length": "8k", "steps": 100}
ASKED["output"] = "./run"
TYPED = ("train", "tiny", "--data", "data.jsonl", "--length", "8k", "--steps", "100", "-o", "./run")


def test_what_is_typed_is_what_python_is_given():
    assert training_request_of(parse(TYPED)) == training.training_request_from(ASKED)
    more = {"rows": 8, "schedule": "cosine", "warmup_steps": 10, "eval_every": 20, "seed": 3}
    more |= {"save_every": 25, "long_documents": "split", "train_on": "all"}
    more |= {"resume_from": "step-000025"}
    words = [*TYPED, "--eval-data", "held_out.jsonl", "more.jsonl"]
    for name, value in more.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    held_out = {"eval_data": ("held_out.jsonl", "more.jsonl")}
    assert training_request_of(parse(words)) == training.training_request_from(
        ASKED | more | held_out
    )


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        ({"rows": 0}, "0 rows", "--rows 1"),
        ({"rows": 10**9}, "1000000000 rows", "--rows 1"),
        ({"seed": -1}, "--seed -1", "--seed 0"),
        ({"seed": 2**63}, f"--seed {2**63}", "--seed 0"),
        ({"save_every": -1}, "--save-every -1", "--save-every 0"),
        ({"steps": "many"}, "steps 'many'", "--steps"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(changes, problem, hint):
    """Of the other fields tests/data/hints.json has what is typed, and what is offered works."""
    with pytest.raises(UsageError) as refused:
        training.training_request_from({**ASKED, **changes})
    assert problem in refused.value.problem
    assert hint in refused.value.hint


@pytest.mark.parametrize("flag", ["--data", "--length", "--steps", "-o"])
def test_what_has_to_be_named_is_asked_for_with_an_example(flag):
    at = TYPED.index(flag)
    with pytest.raises(UsageError) as refused:
        training_request_of(parse([*TYPED[:at], *TYPED[at + 2 :]]))
    assert {"-o": "--output ./run"}.get(flag, flag) in refused.value.hint


def test_a_schedule_is_a_share_of_the_rate_and_ends_where_it_says():
    linear = training.Schedule(name="linear", warmup_steps=4, steps=12)
    assert [linear.factor(step) for step in (1, 2, 3, 4, 5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert linear.factor(12) == pytest.approx(1 / 8)
    cosine = training.Schedule(name="cosine", warmup_steps=0, steps=8)
    assert cosine.factor(1) == 1.0
    assert cosine.factor(5) == pytest.approx(0.5)
    assert {training.Schedule(steps=9).factor(step) for step in range(1, 10)} == {1.0}


def train(folder: Path, **changes: Any) -> None:
    data = folder / "data.jsonl"
    data.write_text('{"text": "a text"}\n')
    usual: dict[str, Any] = {"data": str(data), "length": 256, "steps": 2, "device": "cpu"}
    highwater.train("tiny", **{"output": folder / "run", "memory": "1GiB", **usual, **changes})


@pytest.mark.parametrize(
    ("changes", "problem", "hint"), table("training_settings", "what_is_not_there_is_refused")
)
def test_what_is_not_there_is_refused_and_leaves_no_folder(changes, problem, hint, tmp_path):
    with pytest.raises(UsageError) as refused:
        train(tmp_path, **changes)
    assert problem in refused.value.problem
    assert hint in refused.value.hint
    assert not (tmp_path / "run").exists()


def test_any_step_of_the_training_may_be_recorded_and_no_later_one(tmp_path):
    with pytest.raises(UsageError, match="records step 10, and the last one is 9") as refused:
        train(tmp_path, steps=10, device="cuda", memory_profiler="3,10")
    assert "`--memory-profiler 0`" in refused.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("below", ["notes.txt", "notes.txt/run", "notes.txt/a/run"])
def test_a_run_below_a_file_is_offered_a_folder_that_can_be_made(below, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    below_it = own_folder(tmp_path / below)
    with pytest.raises(UsageError, match=r"notes\.txt is no folder") as refused, below_it:
        pass
    offered = Path(refused.value.hint.split("`")[1].removeprefix("--output "))
    with own_folder(offered):
        assert offered.is_dir()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["dry_run", "max_length", "runner", "trainer"])
def test_a_keyword_of_searches_is_refused_by_its_name(name, tmp_path):
    with pytest.raises(UsageError, match=f"^{name} is a setting of searches") as refused:
        train(tmp_path, **{name: None})
    assert refused.value.hint == f"leave `{name}` out"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ["dry_run: true", "runner: ray", "trainer: trl"])
def test_a_file_that_names_a_run_not_the_engines_is_refused(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(f"{line}\n")
    Path("data.jsonl").write_text('{"text": "a text"}\n')
    words = "train tiny --config study.yaml --data data.jsonl --length 256 --steps 2 --memory 1GiB"
    assert main(f"{words} --device cpu --output run".split()) == EXIT_USER
    assert f"leave `{line.partition(':')[0]}` out" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_folder_that_was_removed_meanwhile_hides_no_error(tmp_path):
    def remove_and_stop() -> None:
        shutil.rmtree(tmp_path / "run")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), own_folder(tmp_path / "run"):
        remove_and_stop()


def checkpoint(run: Path, name: str, step: int) -> Path:
    path = run / training.CHECKPOINTS / name
    path.mkdir(parents=True)
    (path / training.STATE_FILE).write_text(
        to_json(training.RunState(step=step, corpus_digest="c", run_digest="r"))
    )
    return path


def test_a_checkpoint_that_is_half_written_or_set_aside_is_none(tmp_path):
    for step in (7, 1_000_000):
        checkpoint(tmp_path, training.checkpoint_name(step), step)
    for name in ("step-2000000.partial", "step-2000000.set-aside", "step-9", "step-mine"):
        checkpoint(tmp_path, name, 2_000_000)
    (tmp_path / training.CHECKPOINTS / "step-3000000").write_text("a file")
    folder = TrainingFolder(tmp_path)
    assert folder.checkpoint_steps() == [7, 1_000_000]
    assert (folder.last_state().step, folder.done_steps(None)) == (1_000_000, 1_000_000)
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


STEPS = 4


@pytest.fixture
def spec() -> training.TrainingSpec:
    request = request_from({"model": "tiny", "device": "cpu", "memory": 2**30}, keywords=True)
    asked = training.TrainingRequest(data=("data.jsonl",), length=256, steps=STEPS, output="run")
    return training_of(chosen_trial(request, asked, probe()).spec, steps=STEPS, micro_batches=1)


def test_without_a_terminal_every_evaluation_is_a_line_of_its_own(spec, capsys):
    started = training.TrainingProgress(phase="training", steps=STEPS)
    before = msgspec.structs.replace(started, evaluation_loss=3.5, evaluation_step=0)
    first = msgspec.structs.replace(before, step=1, loss=3.25, tokens=512, seconds=2.0)
    last = msgspec.structs.replace(first, step=4, evaluation_loss=3.125, evaluation_step=4)
    with training_progress(spec, done_steps=0) as hear:
        for said in (started, before, before, first, first, last, last):
            hear(said)
    assert capsys.readouterr().err.splitlines() == [
        "held-out loss 3.500 before the first step",
        "step 1 of 4: loss 3.250, 256 tokens/s, about 6 s left",
        "held-out loss 3.125 after step 4",
    ]


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        (((0, 5.5), (8, 5.25)), "5.500 before, 5.250 after"),
        (((8, 5.25),), "5.250 after step 8"),
        (((8, 5.25), (12, 5.125)), "5.250 after step 8, 5.125 after step 12"),
    ],
)
def test_a_held_out_loss_is_of_before_only_where_it_was_measured_then(evaluations, said):
    steps = {"step": 12, "steps": 12, "losses": (5.0,), "evaluations": evaluations}
    result = training.TrainingResult(status="done", output_directory="run", **steps)
    assert ("held-out loss", said) in training_table(result).rows


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny")
    return tmp_path


def prepared_with(record: Any, on_phase: Any = None, **named: Any) -> Any:
    Path("data.jsonl").write_text(json.dumps(record) + "\n")
    words = {"data": ["data.jsonl"], "length": 64, "steps": 2, "output": "run"}
    request = request_from({"model": "tiny", "device": "cpu", **named})
    told = {} if on_phase is None else {"on_phase": on_phase}
    return prepare_training(request, training.training_request_from(words), **told)


@pytest.mark.parametrize(
    ("named", "rate"),
    [
        ({"lora": 4}, 1e-4),
        *deep(({}, 1e-5), ({"lora": 4, "lora_merged": True}, 1e-4)),
        *deep(({"lora": 4, "learning_rate": 3e-5}, 3e-5)),
    ],
    ids=str,
)
def test_adapters_learn_faster_unless_a_rate_is_named(named, rate, in_a_folder):
    record = {"text": "one two three four five six seven"}
    with own_folder(in_a_folder / "run"):
        prepared = prepared_with(record, **named)
    assert prepared.spec.trial.hyperparameters.learning_rate == rate
    (said,) = (line for line in prediction_lines(prepared) if "learning rate" in line)
    assert f"{rate:g}" in said
    assert (" 1e-05," in said) == (rate == 1e-5)
    share = re.findall(r"([\d,]+) of ([\d,]+) parameters trained", said)
    assert (share[0][0] == share[0][1]) == ("lora" not in named)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"id": 7, "messages": []},
        {"text": None, "conversations": []},
    ],
    ids=str,
)
def test_conversations_without_a_tokenizer_are_refused_before_they_are_read(record, in_a_folder):
    phases: list[str] = []
    with pytest.raises(UsageError, match=r"data\.jsonl:1 is a conversation"):
        prepared_with(record, phases.append)
    assert phases == []
