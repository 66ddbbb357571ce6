"""Every command in README.md, CONTRIBUTING.md and docs/ is run, or asked as a dry run; the notebook
of a free GPU is run on the CPU as a kernel runs it, and kept without outputs.
"""

import json
import os
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, FORKING, SIMULATED, TIMEOUT_S

from highwater.cli.grammar import commands, parse
from highwater.errors import EXIT_MACHINE, EXIT_USER

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    path.relative_to(ROOT): path.read_text()
    for path in (*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md")))
}
COMMANDS = {  # by command: a document that has it
    line.removeprefix("$ ").partition("  #")[0].strip(): document
    for document, text in DOCUMENTS.items()
    for kind, block in re.findall(r"```(sh|console)\n(.*?)```", text, re.DOTALL)
    for line in re.sub(r"\\\n\s+", "", block).splitlines()
    if kind == "sh" or line.startswith("$ ")
}
SHOWN = {  # by command: its output as a document shows it, "..." where lines are left out
    command.partition("  #")[0].strip(): output
    for text in DOCUMENTS.values()
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    if output.strip() and command.startswith("highwater ")
}
PROGRAMS = {
    program: document
    for document, text in DOCUMENTS.items()
    for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
}
INLINE = {
    command: document
    for document, text in DOCUMENTS.items()
    if document.parts[:2] != ("docs", "results")
    and document != Path("CHANGELOG.md")  # of their time
    for command in re.findall(
        r"`(highwater [^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
}
COMMANDS_NEEDING_MORE = ("try", "emit", "data")
"""Named in a sentence, with nothing after it."""
TRIES = ("find", "try")
"""What trains for real."""
ELSEWHERE = {
    "search_context_length_capacity --model_path examples/tiny --test_gpu_num 1 2 --test_sp_num "
    "1 2": "takes two minutes, by test_search_context_length_capacity.py",
    "highwater bench attention --device cpu --max-length 1k --implementations dense "
    "block_sparse_5": "measures for real, with fewer lengths by test_bench_command.py",
}
"""Commands that another test runs, and why they are not run here."""
EXTRAS = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


def test_there_is_something_to_run():
    assert len(COMMANDS) >= 20
    assert len({document for document in COMMANDS.values() if document.parts[0] == "docs"}) >= 6
    assert len(PROGRAMS) >= 2
    assert set(ELSEWHERE) <= set(COMMANDS)
    assert len(INLINE) >= 20


def test_the_first_screen_is_a_sentence_a_picture_and_two_commands():
    sentence, picture, commands, links = DOCUMENTS[Path("README.md")].split("\n\n")[1:5]
    assert sentence.count(".") == 1
    assert "\n" not in sentence
    alternative, path = re.fullmatch(r"!\[(.+)\]\((.+)\)", picture).groups()
    assert len(alternative) > 60
    assert (ROOT / path).is_file()
    assert (
        len(re.findall(r"^highwater ", commands, re.MULTILINE))
        == len(commands.splitlines()) - 2
        == 2
    )
    assert "(docs/guide-h200.md)" in links


def test_the_readme_is_short_and_its_training_learns():
    text = DOCUMENTS[Path("README.md")]
    assert len(text.encode()) < 5_000
    assert len(re.findall(r"(?<!\!)\[[^]]*\]\(", text)) <= 8
    losses = [float(loss) for loss in re.findall(r"^step \d+ of \d+: loss ([\d.]+)", text, re.M)]
    assert len(losses) >= 3
    assert losses == sorted(losses, reverse=True)
    (shown,) = re.findall(r"^\$ highwater (train .*)$", text, re.MULTILINE)
    assert parse(shlex.split(shown)).command_name == "train"


@pytest.mark.parametrize(("command", "document"), COMMANDS.items(), ids=COMMANDS)
def test_a_command_in_a_document_runs(command, document, run):
    program, *words = shlex.split(command)
    if command in ELSEWHERE:
        return
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets), f"the Makefile has no such target as {document} names"
        return
    if program == "python3":  # as this environment was made
        assert words == shlex.split("-m venv .venv && . .venv/bin/activate")
        return
    if program == "pip":
        (extras,) = re.findall(r"^install \.(?:\[(.+)\])?$", " ".join(words))
        assert set(filter(None, extras.split(","))) <= EXTRAS
        return
    words = [
        str(ROOT / word) if word.startswith(("examples/", "docs/", "tests/")) else word
        for word in words
    ]
    lacks = lacking(words)
    if lacks is not None:
        done = run(program, *words)
        problem, _, hint = done.stderr.splitlines()[-3:]
        assert done.returncode in (EXIT_USER, EXIT_MACHINE)
        assert lacks in problem, "that is all it lacks"
        assert hint.startswith("hint: ")
        return
    if words[0] in TRIES and not {"--dry-run", "--print-config"} & set(words):
        words += ["--device", "cuda"] if "cpu" not in words else []
        # a dry run proves nothing by memory alone
        words += ["--print-config" if "--proof" in words else "--dry-run"]
    done = run(program, *words)
    assert done.returncode == int(done.stdout.startswith("No: ")), done.stderr
    assert done.stdout
    if command in SHOWN:
        _assert_shown(SHOWN[command], done.stdout)
    grids = not {"--length", "--proof", "--print-config", "--data", "--json"} & set(words)
    if words[0] == "predict" and grids:
        first = done.stdout.splitlines()[0]
        longest = r"longest: ≥?[\d,]+(; by .*?: ≥?[\d,]+)?"
        longest += "|the longest it was made for|prompt and response"
        tokens = rf"(up to|its native) [\d,]+ tokens( \((({longest})(, |\)))+)?"
        assert re.search(rf" trains? {tokens} on |^No: ", first)
    if words[0] == "find" and grids:
        assert " trains up to " in done.stdout


def lacking(words: list[str]) -> str | None:
    """What the problem says that a command lacks on this machine; None: it runs here."""
    if words[0] == "train" and "cpu" not in words:
        return "no GPU is visible"
    is_liger = {"--exact", "transformers", "chunked"} <= set(words)
    return "no kernels of Liger" if is_liger and find_spec("liger_kernel") is None else None


def _assert_shown(shown: str, printed: str) -> None:
    """Each part that a document shows between ``...`` is printed, in this order; where lines are
    broken does not matter.
    """
    rest = " ".join(printed.split())
    for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE):
        words = " ".join(part.split())
        assert words in rest, words
        rest = rest.partition(words)[2]


def test_guides_and_questions_show_what_commands_print():
    assert len(SHOWN) >= 9
    with pytest.raises(AssertionError):
        _assert_shown("a\n...\nb", "b\na\n")


@pytest.mark.parametrize(("command", "document"), INLINE.items(), ids=INLINE)
def test_a_command_within_a_sentence_is_one_of_the_grammar(command, document):
    """What cannot be run here (it needs a GPU, a minute, or says MODEL) has at least commands and
    flags that exist.
    """
    words = shlex.split(command.partition(" >")[0].replace("...", ""))[1:]
    if len(words) == 1 and words[0] in COMMANDS_NEEDING_MORE:
        assert words[0] in commands()
    else:
        assert parse([word.strip("[]") for word in words]).command_name == words[0], document


@pytest.mark.parametrize(("program", "document"), PROGRAMS.items(), ids=map(str, PROGRAMS.values()))
def test_a_program_in_a_document_runs(program, document, tmp_path, fork_server):
    done = fork_server.run(f"-c{FORKING}{program}", within_s=TIMEOUT_S, cwd=tmp_path)
    assert done.returncode == 0, f"{document}: {done.stderr}"
    assert done.stdout


def links(text: str) -> set[str]:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return {
        target.partition("#")[0]
        for target in re.findall(r"\]\(([^()\s]+)\)", prose)
        if not re.match(r"[a-z]+:|#", target)
    }


@pytest.mark.parametrize(
    "document", [path for path, text in DOCUMENTS.items() if links(text)], ids=str
)
def test_a_link_leads_to_a_file_of_the_repository(document):
    assert [
        link for link in links(DOCUMENTS[document]) if not (ROOT / document.parent / link).exists()
    ] == []


SKILL = DOCUMENTS[Path("SKILL.md")]
FIELDS = re.findall(r"^\| `(\w+)` \| `([\w.\[\]]+)` \|", SKILL, re.MULTILINE)
"""A command, and a path in what it prints as JSON."""
ANSWERED = {
    "predict": ("Qwen3-8B", "--gpus", "8xH100-80GB"),
    "recommend": ("Qwen3-8B", "--gpus", "8xH100-80GB", "--length", "64k"),
    "doctor": (),
    "find": ("Qwen3-0.6B", *SIMULATED),
    "try": ("Qwen3-0.6B", "--length", "8k", *SIMULATED),
}


def test_the_skill_is_short_and_an_agent_finds_it():
    assert len(SKILL.splitlines()) <= 80
    start, matter, _ = SKILL.split("---\n", 2)
    assert start == ""
    assert re.fullmatch(r"name: highwater\ndescription: .{1,1024}\n", matter)
    assert len([command for command, where in COMMANDS.items() if where == Path("SKILL.md")]) >= 7
    assert {command for command, _ in FIELDS} == set(ANSWERED)


@pytest.mark.parametrize("command", ANSWERED)
def test_what_the_skill_reads_of_an_answer_is_in_it(command, run):
    done = run("highwater", command, *ANSWERED[command], "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    for _, path in (field for field in FIELDS if field[0] == command):
        found = [answer]
        for name in path.split("."):
            key = name.removesuffix("[]")
            found = [each[key] for each in found]
            if name.endswith("[]"):
                found = [each for several in found for each in several]
            assert found, path


NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
KERNEL = """\
import shlex, subprocess
def shell(words):
    print("$", words, flush=True)
    subprocess.run(shlex.split(words), check=True)
"""
"""What stands for IPython's ``!``, whose words take ``{NAME}`` from Python."""


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text())


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_it_is_kept_without_outputs_and_in_one_form(notebook):
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 8
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" == NOTEBOOK.read_text()
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert '%pip install --quiet "{SOURCE}[train]"' in source(code[0])


def test_every_cell_runs_on_the_cpu_and_the_loss_falls(notebook, tmp_path, fork_server):
    lines = [
        re.sub(r"^!(.*)$", r"shell(f'\1')", line)
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
        for line in source(cell).splitlines()
        if not line.startswith("%pip")  # it is installed, and the tests have no network
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    program = "\n".join(("-c", FORKING, KERNEL, *lines))
    done = fork_server.run(program, within_s=TIMEOUT_S, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "what works here" in said
    assert "Qwen3-0.6B trains its native 40,960 tokens (longest: 348,160) on 1 x L4-24GB" in said
    assert "Yes: Qwen3-4B trains 16,384 tokens on 1 x L4-24GB: safe, " in said
    assert " Predicted for highwater. With LoRA of rank 16.\n" in said
    assert "tiny trains up to 128 tokens on 1 process on the CPU with 800.0 MiB, measured" in said
    (first, last) = re.findall(
        r"Trained tiny for 8 steps: the loss went from (\S+) to (\S+)\. ", said
    )[0]
    assert float(last) < float(first)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert len((tmp_path / "twenty.jsonl").read_text().splitlines()) == 20
