"""The control plane starts at once: it imports neither torch nor transformers, whatever is asked of
it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import highwater

SNAPSHOTS = tuple(
    map(str, sorted((Path(__file__).parents[1] / "data" / "snapshots").glob("*.pickle")))
)
HEAVY = ("torch", "transformers", "safetensors", "numpy")
MOST_CALLS = 1_100_000
"""Functions that a command which only talks calls, those of its imports too."""
RECOMMEND = ("recommend", "Qwen3-8B", "--gpus", "4xH20-96GB", "--length", "64k")
DRY = ("--device", "cuda", "--memory", "80GiB", "--dry-run")
FIND = ("find", "Qwen3-0.6B", *DRY)
MODULES = (
    *("highwater", "highwater.api.search", "highwater.cli.commands"),
    *("highwater.cli.search_context_length_capacity", "highwater.trials.local"),
    *("highwater.engine", "highwater.engine.ranks"),
)
COMMANDS = (
    *(("--help",), ("find", "--help"), ("schema",), RECOMMEND),
    (*FIND, "--study", "s.jsonl"),
    ("try", "Qwen3-0.6B", "--length", "8k", *DRY),
    ("guide", "--predict", "Qwen3-8B", "--gpus", "4xA100-80GB", "-o", "guide.md"),
    *(("show", "s.jsonl", "--as", form) for form in ("table", "published", "json")),
    *(("report", "s.jsonl", "-o", f"r.{form}") for form in ("html", "md", "csv", "json")),
    ("profile", *SNAPSHOTS, "--html", "p.html"),
)
"""What trains nothing; each is run after those before it."""
_RUN = f"""
import importlib, json, sys

def check(what):
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    if heavy:
        sys.exit(f"{{what}} imports {{heavy}}")

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    check(name)
from highwater.cli.app import main
for words in json.loads(sys.argv[2]):
    try:
        code = main(words)
    except SystemExit as leaving:
        code = leaving.code
    check(words)
    if code:
        sys.exit(f"{{words}} ended with {{code}}")
"""
_COUNTED = """
import cProfile, sys
counted = cProfile.Profile()
counted.enable()
from highwater.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
counted.disable()
print(sum(each.callcount for each in counted.getstats()), file=sys.stderr)
"""


def run(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=cwd
    )


def test_neither_the_control_plane_nor_a_command_that_trains_nothing_imports_what_is_heavy(
    tmp_path,
):
    done = run(_RUN, json.dumps(MODULES), json.dumps(COMMANDS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [("--help",), FIND, ("predict", "Qwen3-8B", "--gpus", "4xA100-80GB"), RECOMMEND],
    ids=lambda words: words[0],
)
def test_a_command_that_trains_nothing_answers_at_once(words, tmp_path):
    done = run(_COUNTED, *words, cwd=tmp_path)
    calls = int(done.stderr.splitlines()[-1])
    assert 100_000 < calls < MOST_CALLS


def test_the_public_names_are_these():
    assert highwater.__all__ == [
        *(
            *("BlockSparseAttention", "BlockSparseRingDilatedAttention", "DilatedAttention"),
            *("HighwaterError", "MemoryProfiler", "SparsePatternConfig", "__version__"),
            *("cheapest_gpus", "data_lengths", "find"),
            *("guide", "open_study", "predict", "recommend", "register_block_sparse"),
            "run_trial",
        ),
        *("study_report", "train", "write_guide", "write_report"),
    ]
    assert all(getattr(highwater, name) is not None for name in highwater.__all__)
    with pytest.raises(AttributeError):
        _ = highwater.Journal
