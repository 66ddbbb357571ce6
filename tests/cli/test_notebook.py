"""The notebook of a free GPU: run on the CPU as a kernel runs it, and kept without outputs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, FORKING, TIMEOUT_S

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
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
    assert " Predicted. With LoRA of rank 16.\n" in said
    assert "tiny trains up to 128 tokens on 1 process on the CPU with 768.0 MiB, measured" in said
    (first, last) = re.findall(
        r"Trained tiny for 8 steps: the loss went from (\S+) to (\S+)\. ", said
    )[0]
    assert float(last) < float(first)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert len((tmp_path / "twenty.jsonl").read_text().splitlines()) == 20
