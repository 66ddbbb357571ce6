"""What the catalog has, listed: every name in it can be typed elsewhere."""

import json

import pytest
from conftest import following, offered, refusal

from highwater.model.model_place import catalog_names, model_catalog
from highwater.nouns.hardware import gpu_catalog


def test_every_model_is_listed_with_its_id_and_its_source(highwater):
    done = highwater("models")
    assert done.returncode == 0
    for model in model_catalog():
        assert any(
            line.split()[:2] == [model.name, model.hub_id or "-"]
            for line in done.stdout.splitlines()
        )
    listed = json.loads(highwater("models", "--json").stdout)["models"]
    assert sorted(each["model"]["name"] for each in listed) == catalog_names()
    assert all(each["model"]["source"] and each["shape"]["layers"] for each in listed)
    assert highwater(*following(done)).returncode == 0


def test_every_kind_of_gpu_is_listed_with_its_source(highwater):
    done = highwater("gpus")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for kind in gpu_catalog():
        assert any(line.split()[:1] == [kind.name] for line in lines)
        assert f"{kind.name}: {kind.source}" in lines
    listed = json.loads(highwater("gpus", "--json").stdout)["gpus"]
    assert [each["name"] for each in listed] == [kind.name for kind in gpu_catalog()]
    assert highwater(*following(done)).returncode == 0


def test_a_list_has_the_names_with_the_words_that_were_typed(highwater):
    listed = json.loads(highwater("models", "QWEN3", "8b", "--json").stdout)["models"]
    assert "Qwen3-8B" in [each["model"]["name"] for each in listed]
    assert all("qwen3" in each["model"]["name"].lower() for each in listed)
    assert highwater("gpus", "v100").returncode == 0


@pytest.mark.parametrize("command", ["models", "gpus"])
def test_a_word_that_no_name_has_is_told(highwater, command):
    problem, hint = refusal(highwater(command, "no-such-thing"), 2)
    assert "'no-such-thing'" in problem
    assert highwater(*offered(hint)[0][1:]).returncode == 0
