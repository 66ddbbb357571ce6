"""The report of a study: brackets, figures and commands are those of its trials."""

import shlex
import time

import msgspec
import pytest
from studies import QUESTION, REAL, real_report, report_of, study_of, trial

from highwater import study_report
from highwater.cli.console import error
from highwater.cli.flags import typed_values
from highwater.cli.grammar import commands, parse
from highwater.errors import UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.hardware import Machine
from highwater.nouns.plan import plan, plan_trial
from highwater.nouns.request import request_from
from highwater.nouns.secrets import HIDDEN, KEPT, LOGGED, hidden_words, kept, without_secrets
from highwater.nouns.study import Question, RecordedTrial
from highwater.nouns.trial import Failure, LogEnd, Outcome, RankReport, TrialResult, TrialSpec
from highwater.pages.study_commands import find_words, try_words
from highwater.pages.study_page import predicted_cells, question_table, study_markdown
from highwater.pages.study_report import StudyReport, TrialReport, judged
from highwater.search.cell_outcomes import TrialFinished
from highwater.search.predicted_study import PredictedTrial
from highwater.search.scheduler import recorded_search
from highwater.store.journal import open_journal, read_study
from highwater.trials.simulated import OneByOne, SimulatedRunner, UpperFormula
from highwater.units import GIB
from places import machine_with, question_of
from tables import table


@pytest.mark.corpus
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_report_of_a_real_study_closes_every_bracket_at_its_answer(path):
    report = study_report(path)
    assert len(report.trials) == len(report.study.trials)
    for cell in report.cells:
        if cell.answer is not None:
            last = cell.bracket[-1]
            assert (last.fits_tokens or 0) == cell.answer.reach_tokens
            if cell.answer.limit == "memory":
                assert last.does_not_fit_tokens == cell.answer.does_not_fit_tokens
    ended = [trial for trial in report.trials if trial.outcome is not None]
    numbers = [trial.number for trial in ended if not trial.outcome.is_fit]
    assert [failed.trial for failed in report.failures] == numbers
    assert all(trial.predicted is not None for trial in report.trials)
    assert all(cell.predicted is not None for cell in report.cells)


FULL = ("--proof", "full")
"""What a search has to name now that proved in full before that was something to name."""


def test_figures_of_a_real_study_are_those_of_its_fullest_rank():
    report = real_report("qwen3-4b-card-full")
    fourth = report.trials[3]
    assert (fourth.length_tokens, fourth.outcome) == (131072, Outcome.FIT)
    assert (fourth.peak_reserved_bytes, fourth.limit_bytes) == (148908277760, 150109880320)
    assert fourth.headroom_bytes == 150109880320 - fourth.device_used_bytes
    assert fourth.allocator == "expandable_segments:False"
    assert report.versions["torch"] == ("2.11.0+cu130",)
    assert report.device_names == ("NVIDIA H200",)
    assert (report.label, report.predictions.shared_trials) == ("measured", 3)


def test_a_report_is_one_document_that_can_be_read_again():
    report = real_report("grpo-0.6b-1")
    assert from_json(to_json(report), StudyReport) == report
    assert report.schema_version == 1


def test_a_bracket_closes_by_what_trials_told_with_the_margin():
    ends = {8192: Outcome.FIT, 65536: Outcome.OUT_OF_MEMORY}
    undecided = (Outcome.TIMEOUT, Outcome.CRASHED, Outcome.HOST_OUT_OF_MEMORY)
    told = [*ends.items(), *((32768, each) for each in undecided)]
    told += [(16384, Outcome.MEMORY_ONLY_FIT), (20480, None)]
    report = report_of(study_of(*(trial(*each) for each in told)))
    steps = [(s.fits_tokens, s.does_not_fit_tokens) for s in report.cells[0].bracket]
    open_ones, closed = [(8192, None), *[(8192, 65536)] * 3], [(8192, 32768), *[(16384, 32768)] * 2]
    assert steps == open_ones + closed
    question = msgspec.structs.replace(QUESTION, margin_bytes=2 * GIB)
    report = report_of(study_of(trial(8192, Outcome.FIT, used_bytes=79 * GIB), question=question))
    assert not report.trials[0].counts_as_fit
    assert report.cells[0].bracket[0].does_not_fit_tokens == 8192


def test_a_cell_without_an_answer_shows_how_far_its_bracket_has_closed():
    def edge(*trials: RecordedTrial) -> tuple[str, ...]:
        return predicted_cells(report_of(study_of(*trials))).rows[0][-2:]

    assert edge() == ("-", "-")
    assert edge(trial(8192, Outcome.OUT_OF_MEMORY)) == ("-", "8,192")
    fits = (trial(8192, Outcome.FIT), trial(16384, Outcome.MEMORY_ONLY_FIT))
    closed = (*fits, trial(20480, Outcome.OUT_OF_MEMORY), trial(12288, None))
    assert edge(*closed) == ("16,384", "20,480")


def test_a_study_that_is_not_finished_says_so():
    empty = report_of(study_of())
    assert not empty.is_complete
    assert empty.trials == ()
    assert empty.failures == ()
    assert empty.cells[0].bracket == ()
    assert empty.cells[0].answer is None
    begun = report_of(study_of(trial(8192, None)))
    assert (begun.trials[0].outcome, begun.failures) == (None, ())
    assert "no end is recorded" in begun.trials[0].reason


@pytest.mark.parametrize(
    ("outcome", "used", "said"),
    [
        (Outcome.FIT, 30, "inside"),
        (Outcome.MEMORY_ONLY_FIT, 31, "above"),
        (Outcome.FIT, 28, "below"),
        (Outcome.FIT, None, "unknown"),
        (Outcome.CRASHED, 30, "unknown"),
        (Outcome.HOST_OUT_OF_MEMORY, 30, "unknown"),
        (Outcome.OUT_OF_MEMORY, 10, "above"),
    ],
)
def test_what_was_measured_lies_inside_the_interval_or_it_is_said(outcome, used, said):
    ends = {"low_bytes": 29 * GIB, "high_bytes": 30 * GIB}
    interval = msgspec.structs.replace(a_prediction().interval, **ends)
    study = study_of(trial(8192, outcome, used_bytes=None if used is None else used * GIB))
    predicted = msgspec.structs.replace(a_prediction(), interval=interval)
    assert judged(msgspec.structs.replace(report_of(study).trials[0], predicted=predicted)) == said


def test_a_trial_that_ran_out_is_no_surprise_where_the_upper_end_is_above_its_limit():
    reported = report_of(study_of(trial(8192, Outcome.OUT_OF_MEMORY, used_bytes=GIB))).trials[0]
    tight = msgspec.structs.replace(reported, limit_bytes=a_prediction().interval.high_bytes - 1)
    assert judged(tight).startswith("ran out, as ")
    assert judged(msgspec.structs.replace(tight, predicted=None)) == "unknown"


def a_prediction() -> PredictedTrial:
    found: TrialReport = report_of(study_of(trial(8192, Outcome.FIT))).trials[0]
    assert found.predicted.interval is not None
    return found.predicted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cpu", "device_total_bytes": None}, "trials ran on the CPU"),
        ({"data": "my.batches:packed"}, "data of their own"),
        (dict.fromkeys(("memory_budget_bytes", "device_total_bytes")), "nobody recorded how much"),
    ],
)
def test_where_the_formula_has_nothing_to_say_the_report_says_why(changes, said):
    question = msgspec.structs.replace(QUESTION, **changes)
    report = report_of(study_of(trial(8192, Outcome.FIT), question=question))
    assert said in str(report.predictions.reason)
    assert "formula" not in dict(question_table(report).rows)["ordered by"]
    assert (report.trials[0].predicted, report.cells[0].predicted) == (None, None)


def the_question(words: tuple[str, ...], machine: Machine) -> Question:
    return plan(request_from(typed_values(parse(words[1:]))), machine).question


def the_trial(words: tuple[str, ...], machine: Machine) -> TrialSpec:
    arguments = parse(words[1:])
    return plan_trial(request_from(typed_values(arguments)), machine, int(arguments.length))


@pytest.mark.corpus
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_commands_of_a_real_study_ask_the_very_same(path):
    study = read_study(path)
    total_bytes = study.question.device_total_bytes
    machine = machine_with(4, name=study.question.device_name, memory_total_bytes=total_bytes)
    machine = msgspec.structs.replace(machine, host_memory_total_bytes=2048 * GIB)
    assert the_question(find_words(study.question), machine).key == study.question.key
    for recorded in study.trials:
        words = try_words(recorded.spec, study.question.model)
        assert the_trial(words, machine).key == recorded.spec.key


@pytest.mark.parametrize("settings", table("study_report", "a_question_that_was_asked_from_python"))
def test_a_question_that_was_asked_from_python_can_be_typed(settings):
    question = question_of(**settings)
    assert the_question(find_words(question), machine_with(0)).key == question.key
    spec = question.trial(question.cells[-1], 8192)
    words = (*try_words(spec, question.model), "--dry-run")
    assert the_trial(words, machine_with(0)).key == spec.key


def test_the_commands_are_the_typed_one_one_in_a_new_study_and_one_for_each_end():
    report = real_report("qwen3-0.6b-79gib-full")
    typed, again, *edges = report.commands
    assert typed.words == report.study.command
    assert again.words[-2:] == ("--study", "qwen3-0.6b-79gib-full-again.jsonl")
    assert again.words.count("--study") == 1
    lengths = [int(command.words[command.words.index("--length") + 1]) for command in edges]
    assert lengths == [196608, 204800, 196608, 204800]


REST = ("--loss", "full", *FULL)


@pytest.mark.parametrize(
    ("named", "path", "words"),
    [
        (("--study", "a.jsonl"), "{here}/a.jsonl", ("--study", "a.jsonl", *REST)),
        (("--study=./a.jsonl",), "a.jsonl", ("--study=./a.jsonl", *REST)),
        (("--study", "b.jsonl"), "my a.jsonl", (*REST, "--study", "my a.jsonl")),
        (("--study=b.jsonl",), "a.jsonl", (*REST, "--study", "a.jsonl")),
        ((), "logs/tiny/study-1.jsonl", (*REST, "--study", "logs/tiny/study-1.jsonl")),
    ],
)
def test_the_command_for_the_rest_is_about_the_file_read(named, path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    find = ("highwater", "find", "tiny")
    study = study_of(path=path.format(here=tmp_path), command=(*find, *named, "--loss", "full"))
    assert report_of(study).commands[0].words == (*find, *words)
    in_memory = msgspec.structs.replace(study, path=None)
    assert report_of(in_memory).commands[0].words == in_memory.command


@pytest.mark.parametrize(
    ("here", "home", "shown"), table("study_report", "wherever_a_report_is_made_your_own_home")
)
def test_wherever_a_report_is_made_no_home_is_named(here, home, shown, tmp_path, monkeypatch):
    kept = tmp_path / "mine" / "kept"
    kept.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / here)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    report = report_of(study_of(path=str(kept / "study-1.jsonl")))
    assert dict(question_table(report).rows)["study"] == shown.format(top=tmp_path)


def test_a_failure_is_in_the_words_of_the_rank_that_failed_first():
    crashed = trial(8192, Outcome.CRASHED, text="ValueError: no\nsecond line")
    (failed,) = report_of(study_of(crashed), LogEnd(lines=("the end",))).failures
    assert (failed.trial, failed.rank, failed.phase) == (1, 0, "forward")
    assert failed.text.splitlines() == ["ValueError: no", "second line"]
    assert failed.log.lines == ("the end",)


def test_a_simulated_study_is_never_called_measured(tmp_path):
    question = question_of(max_length="64k")
    with open_journal(tmp_path / "s.jsonl", question) as journal:
        runner = SimulatedRunner(UpperFormula(shape=question.model.shape))
        list(recorded_search(question, runner, journal))
    report = study_report(tmp_path / "s.jsonl")
    assert report.label == "simulated"
    assert report.is_complete
    assert all("--dry-run" in command.words for command in report.commands)
    text = study_markdown(report).replace("nothing was measured", "")
    assert "measured" not in text
    assert "| simulated: " in text


SECONDS = 5.0
"""Of processor time for a text as long as is looked at: a pattern that goes over it once for each
letter takes minutes."""


@pytest.mark.parametrize("text", table("secrets", "texts"))
def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(text):
    assert HIDDEN in without_secrets(text)
    study = study_of(trial(8192, Outcome.CRASHED, text=text), command=("highwater", "find", text))
    document = to_json(report_of(study, LogEnd(lines=(text,))))
    assert text.split("=")[-1].split()[-1].strip("\"'}") not in document


@pytest.mark.parametrize("command", table("secrets", "commands"))
def test_no_secret_of_a_command_is_left_in_it_and_its_placeholder_is(command):
    words = tuple(shlex.split(command))
    hidden = hidden_words(words)
    assert len(hidden) == len(words)
    assert HIDDEN in " ".join(hidden)
    assert "S3cr3t" not in " ".join(hidden)
    assert "{length}" in " ".join(hidden)
    (whole,) = hidden_words([f"--command={command}"])
    assert "S3cr3t" not in whole
    assert "S3cr3t" not in " ".join(hidden_words(("find", "--command", command)))


@pytest.mark.parametrize("command", table("secrets", "words_of_a_command_that_are_no_secret_stay"))
def test_words_of_a_command_that_are_no_secret_stay(command):
    assert hidden_words(shlex.split(command)) == tuple(shlex.split(command))


def test_no_flag_of_ours_is_taken_for_a_secrets():
    flags = {flag for each in commands().values() for flag in each._option_string_actions}
    assert "--command" in flags
    for flag in flags:
        assert hidden_words((flag, "x", f"{flag}=x")) == (flag, "x", f"{flag}=x")


@pytest.mark.parametrize("text", table("secrets", "a_command_that_an_error_quotes_is_quoted"))
def test_a_command_that_an_error_quotes_is_quoted_without_its_secrets(text):
    hidden = without_secrets(text)
    assert "123456" not in hidden
    assert "swordfish" not in hidden


@pytest.mark.parametrize("text", table("secrets", "what_is_no_secret_stays"))
def test_what_is_no_secret_stays(text):
    assert without_secrets(text) == text


def test_texts_of_real_studies_hold_nothing_that_is_taken_for_a_secret():
    for path in REAL:
        assert HIDDEN not in to_json(study_report(path).study)


@pytest.mark.parametrize("length", [0, 10, KEPT - 1, KEPT, KEPT + 1, 30_000_000])
def test_of_a_long_text_the_beginning_and_the_end_are_kept_and_done_again_nothing_changes(length):
    text = f"RuntimeError: begins {'x' * length} ends"
    short = kept(text)
    assert len(short) <= KEPT + 1
    assert short.startswith("RuntimeError: begins")
    assert short.endswith("ends")
    assert kept(short) == short
    assert ("characters are left out" in short) == (len(text) > KEPT)


def test_no_part_of_a_secret_is_left_where_a_text_is_cut():
    whole = "hf_abcdefghijklmnopqrst"
    for before in range(KEPT * 3 // 4 - 100, KEPT * 3 // 4 + 10):
        start, end = "x " * (before // 2), "z " * (KEPT // 8 - 30 + before % 30)
        assert "hf_" not in kept(f"{start}{whole} {'y' * KEPT} {whole} {end}")


def test_what_a_runner_returns_is_kept_and_recorded_without_secrets_and_within_bounds(tmp_path):
    text = "RuntimeError: HF_TOKEN=hf_abcdefghijklmnopqrst " + "x" * 1_000_000

    class Talkative(OneByOne):
        def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
            failed = Failure(kind="error", phase="data", text=text, hint=text)
            ranks = tuple(RankReport(rank=rank, failure=failed) for rank in range(8))
            return TrialResult(outcome=Outcome.CRASHED, reason=text, ranks=ranks)

    path = tmp_path / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        events = recorded_search(QUESTION, Talkative(), journal)
        told = next(event.result for event in events if isinstance(event, TrialFinished))
    with open_journal(path, QUESTION) as journal:
        (first, *_) = journal.snapshot().trials
        assert first.result == told
    assert path.stat().st_size < 100_000
    for shown in (path.read_text(), to_json(told)):
        assert "hf_abc" not in shown
        assert HIDDEN in shown


def test_an_error_on_stderr_shows_no_secret(capsys):
    failed = "loading failed: Authorization: Bearer abcdefgh12345678"
    error(UsageError(failed, hint="use `--token-budget 16k`"))
    said = capsys.readouterr().err
    assert "abcdefgh12345678" not in said
    assert "`--token-budget 16k`" in said


@pytest.mark.parametrize(
    "letters", ["a", "token", "token:", "-", "a.", "password", "://x:", "x@", 'token="', " "]
)
def test_no_text_is_looked_at_for_long(letters):
    text = letters * (LOGGED // len(letters))
    began = time.process_time()
    kept(text, most=LOGGED)
    assert time.process_time() - began < SECONDS
