"""The help: commands by what people do with them, and three examples of each that work."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import SIMULATED, Run, refusal

from highwater.cli import search_context_length_capacity as published
from highwater.cli.grammar import COMMANDS, commands, grammar, groups, parse

DATA = Path(__file__).parents[1] / "data"
EXAMPLES = [(name, each) for name, command in COMMANDS.items() for each in command.examples]
ON_A_GPU = {
    "highwater bench attention --gpus 2 --memory 24GiB",
    "highwater doctor --measure --json > constants.json",
    "highwater find Qwen3-8B --trainer command --command "
    "'python train.py --max-len {length} --steps {steps}'",
}
"""Examples that only a machine with GPUs answers, and that have no dry run."""
LONG = {"highwater bench attention --device cpu"}
"""Takes a minute; tests/cli/test_bench_command.py runs it with fewer attentions."""
TRIES = ("find", "try")
ONE_STEP = ("--length", "64", "--rows", "1", "--steps", "1", "--memory", "4GiB")
"""What a training on the CPU is asked after its example, so that it takes seconds."""


def words_of(example: str) -> list[str]:
    own = next(part for part in example.split(" && ") if not part.startswith("mkdir"))
    return shlex.split(re.split(r" [>|] ", own)[0])[1:]


def test_the_help_has_every_command_below_what_people_do_with_it(highwater):
    text = highwater("--help", COLUMNS="80").stdout
    below = {
        heading: re.findall(r"^  ([a-z-]+)", block, re.MULTILINE)
        for heading, block in re.findall(r"^(\w[^\n]*):\n((?:  .*\n)+)", text, re.MULTILINE)
        if heading in groups()
    }
    assert below == groups()
    assert highwater("help", COLUMNS="80").stdout == text
    assert highwater("help", "gpus").stdout == highwater("gpus", "--help").stdout
    assert [name for names in below.values() for name in names] == list(commands())
    assert {"bench", "schema"} == set(below["developer tools"])
    assert max(map(len, text.partition("\nexamples:\n")[0].splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_its_three_examples(highwater, name):
    shown = highwater(name, "--help", COLUMNS="60").stdout.partition("\nexamples:\n")[2]
    assert [line.strip() for line in shown.splitlines()] == list(COMMANDS[name].examples)
    assert len(set(COMMANDS[name].examples)) == 3


def test_every_example_is_one_of_the_grammar():
    for name, example in EXAMPLES:
        assert parse(words_of(example)).command_name == name
    for example in grammar().examples:
        assert parse(words_of(example)).command_name
    for example in published.grammar().examples:
        assert published.parse(words_of(example)).model_path


@pytest.fixture
def things(simulated: Path, tmp_path: Path) -> None:
    (tmp_path / "logs" / "m").mkdir(parents=True)
    for name in ("study.jsonl", "logs/m/study-1.jsonl"):
        shutil.copy(simulated, tmp_path / name)
    snapshot = sorted((DATA / "snapshots").glob("*.pickle"))[0]
    for name in ("snapshot", "before", "after"):
        shutil.copy(snapshot, tmp_path / f"{name}.pickle")
    shutil.copy(DATA / "published_capacity_a100_80gb.csv", tmp_path / "capacities.csv")
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "docs" / "guides" / "page.md").write_text("# A page\n\nIt says what it says.\n")
    (tmp_path / "data.jsonl").write_text('{"text": "The cat sat on the mat."}\n')


@pytest.mark.usefixtures("things")
@pytest.mark.parametrize(
    "example", [each for _, each in EXAMPLES if each not in ON_A_GPU | LONG], ids=str
)
def test_an_example_answers(highwater, example):
    words = words_of(example)
    if words[0] == "train":
        _assert_trains(highwater, words)
        return
    if words[0] in TRIES and "--dry-run" not in words:
        # what would train: a law answers in the place of GPUs, which are not here
        words += ["--dry-run", *(() if "--device" in words else SIMULATED[:4])]
    done = highwater(*words)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def _assert_trains(highwater: Run, words: list[str]) -> None:
    """On the CPU it trains and leaves a model; on GPUs it lacks those alone, which are not here."""
    if "cpu" in words:
        done = highwater(*words, *ONE_STEP)
        assert done.returncode == 0, done.stderr
        model = shlex.split(done.stderr.splitlines()[-1])[-1].rpartition("(")[2].strip('")')
        assert Path(model, "model.safetensors").stat().st_size > 1_000_000
    else:
        problem, hint = refusal(highwater(*words), code=2)
        assert "no GPU is visible" in problem
        assert "highwater doctor" in hint


@pytest.mark.parametrize("example", published.grammar().examples)
def test_an_example_of_the_published_script_is_understood(example, run):
    assert example.startswith(published.PUBLISHED)
    shown = run(published.PUBLISHED, "--help").stdout.partition("\nexamples:\n")[2]
    assert example in [line.strip() for line in shown.splitlines()]


@pytest.mark.parametrize("command", ["predict", "recommend", "emit", "find", "try", "train"])
def test_a_help_has_about_15_flags_and_says_how_to_see_the_others(highwater, command):
    parser = commands()[command]
    short = highwater(command, "--help").stdout
    lines = short.splitlines()
    shown = [flag for flag in parser.flags() if any(f"  {flag} " in f"{each} " for each in lines)]
    assert 12 <= len(shown) <= 17
    assert f"All {len(parser.flags())} flags: --help-all" in short
    whole = highwater(command, "--help-all").stdout
    assert all(flag in whole for flag in parser.flags())
    for name, group in parser.sections.items():
        assert f"--help={name}" in short
        told = highwater(command, f"--help={name}").stdout
        assert all(action.option_strings[-1] in told for action in group._group_actions)
        assert "usage" not in told
