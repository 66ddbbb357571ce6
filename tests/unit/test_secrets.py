"""What looks like a secret is in no report; what only resembles one stays."""

import shlex
import time

import pytest
from studies import QUESTION, REAL, report_of, study_of, trial

from highwater import study_report
from highwater.cli.console import error
from highwater.cli.grammar import commands
from highwater.errors import UsageError
from highwater.nouns.codec import to_json
from highwater.nouns.secrets import HIDDEN, KEPT, LOGGED, hidden_words, kept, without_secrets
from highwater.nouns.trial import Failure, LogEnd, Outcome, RankReport, TrialResult, TrialSpec
from highwater.search.cell_outcomes import TrialFinished
from highwater.search.scheduler import recorded_search
from highwater.store.journal import open_journal
from highwater.trials.simulated import OneByOne
from tables import table

SECONDS = 5.0
"""Of processor time for a text as long as is looked at: a pattern that goes over it once for each
letter takes minutes."""
SECRETS = table("secrets", "texts")


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(text):
    hidden = without_secrets(text)
    assert HIDDEN in hidden
    study = study_of(trial(8192, Outcome.CRASHED, text=text), command=("highwater", "find", text))
    document = to_json(report_of(study, LogEnd(lines=(text,))))
    value = text.split("=")[-1].split()[-1].strip("\"'}")
    assert value not in document


COMMANDS = table("secrets", "commands")


@pytest.mark.parametrize("command", COMMANDS)
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


@pytest.mark.parametrize(
    "command",
    table("secrets", "words_of_a_command_that_are_no_secret_stay"),
)
def test_words_of_a_command_that_are_no_secret_stay(command):
    assert hidden_words(shlex.split(command)) == tuple(shlex.split(command))


def test_no_flag_of_ours_is_taken_for_a_secrets():
    flags = {flag for each in commands().values() for flag in each._option_string_actions}
    assert "--command" in flags
    for flag in flags:
        assert hidden_words((flag, "x", f"{flag}=x")) == (flag, "x", f"{flag}=x")


@pytest.mark.parametrize(
    "text",
    table("secrets", "a_command_that_an_error_quotes_is_quoted"),
)
def test_a_command_that_an_error_quotes_is_quoted_without_its_secrets(text):
    hidden = without_secrets(text)
    assert "123456" not in hidden
    assert "swordfish" not in hidden


@pytest.mark.parametrize(
    "text",
    table("secrets", "what_is_no_secret_stays"),
)
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
        short = kept(
            f"{'x ' * (before // 2)}{whole} {'y' * KEPT} {whole} "
            f"{'z ' * (KEPT // 8 - 30 + before % 30)}"
        )
        assert "hf_" not in short


def test_what_a_runner_returns_is_kept_and_recorded_without_secrets_and_within_bounds(tmp_path):
    text = "RuntimeError: HF_TOKEN=hf_abcdefghijklmnopqrst " + "x" * 1_000_000

    class Talkative(OneByOne):
        def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
            ranks = tuple(
                RankReport(
                    rank=r, failure=Failure(kind="error", phase="data", text=text, hint=text)
                )
                for r in range(8)
            )
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
    error(
        UsageError(
            "loading failed: Authorization: Bearer abcdefgh12345678",
            hint="use `--token-budget 16k`",
        )
    )
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
