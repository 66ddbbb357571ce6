"""Paths on a page: no folder of the machine that made it, and everything else as it was."""

import pytest

from highwater.pages.page import without_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/opt/venv/lib/torch/nn/linear.py", line 3', 'File "…/nn/linear.py", line 3'),
        ("--study /mnt/all/find/a.jsonl --length 4096", "--study …/find/a.jsonl --length 4096"),
        ("{here}/docs/a.jsonl and {here}/b", "docs/a.jsonl and b"),
        ("{home}/kept/a.jsonl", "~/kept/a.jsonl"),
        ("see https://a.org/b/c, 12 tokens/s, logs/a/b.log", None),
        ("#!/usr/bin/env bash", None),
        ("/dev/shm/x, /path/to/model", None),
        ("Env + chunked / SP=2", None),
    ],
)
def test_a_path_names_no_folder_of_this_machine(text, shown, tmp_path, monkeypatch):
    here, home = tmp_path / "home" / "me" / "here", tmp_path / "home" / "me"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    found = without_folders(text.format(here=here, home=home) if "{" in text else text)
    assert found == (text if shown is None else shown)
    assert without_folders(found) == found, "what is short stays as it is"
