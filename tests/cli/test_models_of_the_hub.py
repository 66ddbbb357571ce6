"""Models by their ids on the Hub: fetched from a server with the Hub's routes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import SIMULATED, Run, offered, refusal
from hub_server import TOKEN

from places import captured
from tiny_models import TINY

GPUS = ("--gpus", "1xH200-141GB")


class Hub(NamedTuple):
    environment: dict[str, str]
    """What sends a command to it, with a cache of its own."""
    log: Path
    cache: Path

    @property
    def requests(self) -> list[str]:
        return self.log.read_text().splitlines()


def publish(root: Path, hub_id: str, **changes: object) -> None:
    (root / hub_id).mkdir(parents=True)
    (root / hub_id / "config.json").write_text(json.dumps({**TINY, **changes}))


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    root, log, cache = folder / "files", folder / "requests", folder / "cache"
    publish(root, "someone/small-model-instruct")
    publish(root, "gated/small-model")
    publish(root, "someone/with-code", auto_map={"AutoModel": "modeling_own.Own"})
    publish(root, "someone/of-tomorrow", model_type="tomorrow", auto_map={"AutoModel": "own.Own"})
    (root / "someone" / "adapter").mkdir()
    with log.open("w") as said:
        server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("hub_server.py"), root],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        address = server.stdout.readline().strip()
        environment = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": ""}
        yield Hub({**environment, "HF_HUB_DISABLE_TELEMETRY": "1"}, log, cache)
        server.terminate()
        server.wait()


@pytest.fixture
def predict(highwater: Run, hub: Hub) -> Run:
    return lambda model, **told: highwater("predict", model, *GPUS, **hub.environment | told)


SMALL = "someone/small-model-instruct"


def test_a_model_of_the_hub_is_predicted_by_its_id_and_fetched_once(predict, hub):
    done = predict(SMALL)
    assert (done.returncode, "small-model-instruct" in done.stdout) == (0, True), done.stderr
    assert "someone" not in done.stdout, "the name in tables is the short one"
    asked = len(hub.requests)
    assert asked
    assert all(line.endswith("/config.json") for line in hub.requests), "nothing else is fetched"
    again = predict(SMALL)
    assert (again.returncode, again.stdout, len(hub.requests)) == (0, done.stdout, asked)
    offline = predict(SMALL, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, done.stdout)


def test_every_command_takes_an_id_of_the_hub(highwater, hub):
    for words in (
        ("find", SMALL, *SIMULATED),
        ("try", SMALL, "--length", "2k", *SIMULATED),
        ("recommend", SMALL, "--length", "2k", *GPUS),
        ("guide", "--predict", SMALL, *GPUS),
    ):
        done = highwater(*words, **hub.environment)
        assert done.returncode == 0, (words, done.stderr)
        assert "small-model-instruct" in done.stdout


def test_what_the_hub_withholds_or_lacks_is_told(predict, hub, highwater):
    for token in ("", "hf_of_somebody_else"):
        problem, hint = refusal(predict("gated/small-model", HF_TOKEN=token), 2)
        assert problem.startswith("gated/small-model is gated")
        assert f"{hub.environment['HF_ENDPOINT']}/gated/small-model" in hint
        assert "HF_TOKEN" in hint
        assert offered(hint) == [["hf", "auth", "login"]]
    done = predict("gated/small-model", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    problem, hint = refusal(predict("Qwen/Qwen3-0.8B"), 2)
    assert problem.startswith("the Hub has no model 'Qwen/Qwen3-0.8B'")
    assert highwater("predict", *offered(hint)[0], *GPUS, **hub.environment).returncode == 0
    problem, _ = refusal(predict("someone/adapter"), 2)
    assert problem == "someone/adapter has no config.json on the Hub"


def test_without_the_hub_the_hint_is_the_command_that_fetches_the_model(predict, hub):
    problem, hint = refusal(predict(SMALL, HF_HUB_OFFLINE="1"), 2)
    assert "HF_HUB_OFFLINE is set" in problem
    assert not hub.requests
    unset, _, switch, program, *fetch = offered(hint)[0]
    assert (unset, switch) == ("env", "HF_HUB_OFFLINE")
    assert program == "hf"
    fetched = captured(
        [sys.executable, "-m", "huggingface_hub.cli.hf", *fetch],
        env={**os.environ, **hub.environment},
    )
    assert fetched.returncode == 0, fetched.stderr
    assert predict(SMALL, HF_HUB_OFFLINE="1").returncode == 0


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", None], ids=["nobody", "broken"])
def test_a_hub_that_does_not_answer_is_told_at_once(predict, endpoint):
    told = {"HF_ENDPOINT": endpoint} if endpoint else {}
    problem, hint = refusal(predict("broken/model", **told), 2)
    assert problem.startswith("broken/model is not in the Hub's cache, and the Hub does not give")
    assert offered(hint) == [["hf", "download", "broken/model", "config.json"]]


def test_code_that_comes_with_a_model_is_not_run_and_that_is_said(predict):
    done = predict("someone/with-code")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "auto_map" in line and "not run" in line]
    problem, _ = refusal(predict("someone/of-tomorrow"), 2)
    assert "its own code (auto_map) is not run" in problem
