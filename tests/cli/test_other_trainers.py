"""``--trainer command``: a search of somebody else's training script. Secrets of its command the
trainer is given, and nobody else is shown them.
"""

import json
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import following, refusal

from highwater.store.journal_file import sealed

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import sys

length, steps = map(int, sys.argv[1:])
for step in range(1, steps + 1):
    kept = b"x" * (6000 * length)
    print(f"step {step}/{steps} loss {kept[0] / step:.3f}", flush=True)
"""
CPU = ("--device", "cpu", "--memory", "1GiB", "--timeout", "120s")
LENGTHS = ("--start-length", "32k", "--resolution", "64k", "--max-length", "256k")


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = f"{shlex.quote(sys.executable)} train.py {{length}} {{steps}}"
    return ("--trainer", "command", "--command", words)


def test_a_search_of_a_script_finds_its_capacity_and_goes_on(highwater, tmp_path, command):
    words = ("find", "Qwen3-0.6B", *command, *CPU, *LENGTHS, "--study", "study.jsonl")
    done = highwater(*words)
    assert done.returncode == 0, done.stderr
    assert "by your command, measured" in done.stdout
    assert "data segment, sampled" in done.stdout
    study = json.loads(highwater("show", "study.jsonl", "--as", "json").stdout)
    (answer,) = study["answers"]
    assert answer["limit"] == "memory"
    assert answer["capacity_tokens"] >= 32_768
    assert answer["does_not_fit_tokens"] == answer["capacity_tokens"] + 65_536
    again = highwater(*words)
    assert again.returncode == 0
    assert "finished trials are not run again" in again.stderr
    assert "trying" not in again.stderr
    assert again.stdout == done.stdout
    report = highwater("report", "study.jsonl")
    assert report.returncode == 0
    assert "train.py {length} {steps}" in report.stdout
    other = highwater(*words[:-1], "study.jsonl", "--done-pattern", "step 2/2")
    assert other.returncode == 2, "another proof is another question"
    assert len(list((tmp_path / "logs").rglob("*.log"))) == len(study["trials"])
    assert not list((tmp_path / "logs").rglob("highwater-*"))


def test_one_trial_says_what_it_was_and_offers_the_search(highwater, command):
    done = highwater("try", "Qwen3-0.6B", "--length", "4k", *command, *CPU)
    assert done.returncode == 0, done.stderr
    assert "2 steps seen in the log" in done.stdout
    assert "train.py {length} {steps}" in done.stdout
    assert following(done) == ["find", "Qwen3-0.6B", *command, *CPU]


SECRET, KEY = "tuna-1234", "S3cr3tS3cr3t"
SECRETIVE = f"""
import sys
words = sys.argv[1:]
assert words[1:] == ["--password", {SECRET!r}, "--api-key={KEY}"], "it is not what was typed"
if int(words[0]) > 100:
    bytearray(2 ** 33)
print("step 1/2 loss 1.0\\nstep 2/2 loss 0.9", flush=True)
"""
SHORT = ("--start-length", "64", "--resolution", "64", "--max-length", "256")


def words_with(secret: str, *more: str) -> tuple[str, ...]:
    command = f"{shlex.quote(sys.executable)} train.py {{length}} --password {secret}"
    command += f" --api-key={KEY}"
    how = ("--trainer", "command", "--command", command, *CPU, *SHORT)
    return ("find", "Qwen3-0.6B", *how, *more)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SECRETIVE)
    return tmp_path


def study_in(place: Path) -> Path:
    (study,) = (place / "logs").rglob("study-*.jsonl")
    return study


def check_nothing_shows(place: Path, *texts: str) -> None:
    """No text and no file that was written, nor the name of one, has a secret in it."""
    files = [path for path in place.rglob("*") if path.is_file() and path.name != "train.py"]
    said = [*texts, *map(str, files), *(path.read_text(errors="replace") for path in files)]
    assert not [text[:2000] for text in said if SECRET in text or KEY in text]


def test_a_search_with_secrets_shows_them_nowhere_and_its_study_goes_on(highwater, place):
    done = highwater(*words_with(SECRET))
    assert done.returncode == 0, done.stderr
    study = study_in(place)
    assert stat.S_IMODE(study.stat().st_mode) == 0o600
    shown = [done]
    for words in (
        *(("show", str(study), "--as", each) for each in ("table", "published", "lines", "json")),
        ("report", str(study)),
        ("report", str(study), "--json"),
        *(
            ("report", str(study), "-o", f"report{end}")
            for end in (".html", ".md", ".csv", ".json")
        ),
        words_with(SECRET, "--json"),
    ):
        shown.append(highwater(*words))
        assert shown[-1].returncode == 0, shown[-1].stderr
    check_nothing_shows(place, *(each.stdout + each.stderr for each in shown))
    assert "[hidden]" in (place / "report.md").read_text()
    before = json.loads(highwater("show", str(study), "--as", "json").stdout)["trials"]
    assert {trial["result"]["outcome"] for trial in before} == {"FIT", "OUT_OF_MEMORY"}
    assert "finished trials are not run again" in highwater(*words_with(SECRET)).stderr
    assert json.loads(highwater("show", str(study), "--as", "json").stdout)["trials"] == before


@pytest.mark.parametrize(
    "typed", [f"--password='correct {SECRET} battery'", f"--gh-pat {SECRET} -u me:{KEY}"]
)
def test_a_trainer_that_prints_its_words_shows_no_secret(typed, highwater, place):
    (place / "train.py").write_text(
        "import sys; sys.exit(f'train.py: error: unrecognized arguments: {sys.argv[1:]}')"
    )
    command = f"{shlex.quote(sys.executable)} train.py {{length}} {typed}"
    how = ("--trainer", "command", "--command", command, *CPU, *SHORT)
    done = highwater("find", "Qwen3-0.6B", *how)
    assert done.returncode == 4, done.stderr
    study = study_in(place)
    assert "unrecognized arguments" in study.read_text()
    assert stat.S_IMODE(study.stat().st_mode) == 0o600
    for log in place.rglob("*.log"):  # the trainer's own words
        log.unlink()
    check_nothing_shows(place, done.stdout, done.stderr, highwater("report", str(study)).stdout)


def test_another_secret_is_another_question_and_a_hidden_one_is_asked_for(highwater, place):
    assert highwater(*words_with(SECRET, "--study", "study.jsonl")).returncode == 0
    other = highwater(*words_with("cod-5678", "--study", "study.jsonl"))
    assert other.returncode == 2
    assert "asks another question: foreign.secrets_digest" in other.stderr
    check_nothing_shows(place, other.stderr)
    assert "cod-5678" not in other.stderr
    problem, hint = refusal(highwater(*words_with("[hidden]", "--study", "study.jsonl")), 2)
    assert "[hidden]" in problem
    assert "type the secret itself" in hint


def as_recorded_before(study: Path) -> None:
    """Write a study as a version did that kept commands as they were typed."""
    checksum, lines = "", []
    for line in study.read_bytes().splitlines():
        document = json.loads(line)
        del document["checksum"]
        text = json.dumps(_with_secrets(document), separators=(",", ":"))
        content, checksum = sealed(text, after=checksum)
        lines.append(content + b"\n")
    study.write_bytes(b"".join(lines))
    study.chmod(0o644)


def _with_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        found = {name: _with_secrets(each) for name, each in value.items()}
        found.pop("secrets_digest", None)
        return found
    if isinstance(value, list):
        return [_with_secrets(each) for each in value]
    if isinstance(value, str) and value.startswith("--api-key="):
        return f"--api-key={KEY}"
    return SECRET if value == "[hidden]" else value


def test_a_study_with_secrets_of_before_is_shown_without_them_and_goes_on(highwater, place):
    first = highwater(*words_with(SECRET, "--study", "study.jsonl"))
    study = place / "study.jsonl"
    as_recorded_before(study)
    assert SECRET in study.read_text()
    shown = highwater("show", "study.jsonl", "--as", "json")
    for each in (shown, highwater("report", "study.jsonl")):
        assert each.returncode == 0, each.stderr
        assert SECRET not in each.stdout + each.stderr
        assert KEY not in each.stdout + each.stderr
    again = highwater(*words_with(SECRET, "--study", "study.jsonl"))
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert "finished trials are not run again" in again.stderr
    assert stat.S_IMODE(study.stat().st_mode) == 0o600
