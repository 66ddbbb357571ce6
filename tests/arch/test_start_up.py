"""The control plane starts at once: it imports neither torch nor transformers, whatever is asked of
it.
"""

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
_RUN = f"""
import sys
from highwater.cli.app import main
try:
    code = main(sys.argv[1:])
except SystemExit as leaving:
    code = leaving.code
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else code)
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
RECOMMEND = ("recommend", "Qwen3-8B", "--gpus", "4xH20-96GB", "--length", "64k")
DRY = ("--device", "cuda", "--memory", "80GiB", "--dry-run")


def run(code: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=cwd
    )


@pytest.mark.parametrize(
    "module",
    [
        *("highwater", "highwater.api.search", "highwater.cli.commands"),
        *("highwater.cli.search_context_length_capacity", "highwater.trials.local"),
        *("highwater.engine", "highwater.engine.ranks"),
    ],
)
def test_importing_the_control_plane_imports_nothing_heavy(module):
    done = run(f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "words",
    [
        *(
            ("--help",),
            ("find", "--help"),
            ("find", "Qwen3-0.6B", *DRY),
            ("try", "Qwen3-0.6B", "--length", "8k", *DRY),
            ("schema",),
        ),
        ("guide", "--predict", "Qwen3-8B", "--gpus", "4xA100-80GB", "-o", "guide.md"),
        RECOMMEND,
    ],
)
def test_a_command_that_trains_nothing_imports_nothing_heavy(words, tmp_path):
    done = run(_RUN, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_is_shown_and_reported_of_a_study_imports_nothing_heavy(tmp_path):
    assert run(_RUN, "find", "Qwen3-0.6B", *DRY, "--study", "s.jsonl", cwd=tmp_path).returncode == 0
    for form in ("table", "published", "json"):
        assert run(_RUN, "show", "s.jsonl", "--as", form, cwd=tmp_path).returncode == 0
    for form in ("html", "md", "csv", "json"):
        assert run(_RUN, "report", "s.jsonl", "-o", f"r.{form}", cwd=tmp_path).returncode == 0


def test_a_profile_imports_nothing_heavy(tmp_path):
    assert run(_RUN, "profile", *SNAPSHOTS, "--html", "p.html", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("find", "Qwen3-0.6B", *DRY),
        ("predict", "Qwen3-8B", "--gpus", "4xA100-80GB"),
        RECOMMEND,
    ],
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
            *("cheapest_gpus", "data_lengths", "fewest_gpus", "find"),
            *("guide", "open_study", "predict", "recommend", "register_block_sparse"),
            "run_trial",
        ),
        *("study_report", "train", "write_guide", "write_report"),
    ]
    assert all(getattr(highwater, name) is not None for name in highwater.__all__)
    with pytest.raises(AttributeError):
        _ = highwater.Journal
