"""How many GPUs train a length, which kind does for the least money, and what training costs."""

import json
import re

import pytest
from conftest import following

import highwater
from highwater.errors import HighwaterError
from highwater.nouns.hardware import gpu_catalog

KINDS = ("A100-80GB", "H100", "RTX-4090", "H20")
LENGTH = ("--length", "64k")
highwater_api = highwater
"""Under a name that no fixture has."""


def fits(model: str, gpus: str, **asked: object) -> bool:
    cells = highwater.predict(model, gpus=gpus, **asked).cells  # type: ignore[arg-type]
    return any(each.capacity_tokens for each in cells)


@pytest.mark.parametrize(
    ("kind", "length"), [("L40S", "32k"), ("RTX-4090", "4k"), ("A100-80GB", "128k"), ("H100", "8k")]
)
def test_of_a_kind_without_a_number_the_fewest_that_train_the_length_are_known(kind, length):
    (offer,) = highwater.cheapest_gpus("Qwen3-8B", gpus=(kind,), length=length).offers
    here = {n: fits("Qwen3-8B", f"{n}x{kind}", length=length) for n in range(1, 9)}
    assert offer.fewest_gpus == next((n for n, is_fit in here.items() if is_fit), None)


def test_a_kind_without_a_number_is_one_gpu_and_then_the_fewest_that_do(highwater):
    lora = ("--lora", "16", "--lora-targets", "q_proj,k_proj,v_proj,o_proj")
    asked = ("predict", "gpt-oss-120b", "--length", "32k", *lora)
    done = highwater(*asked, "--gpus", "H200")
    assert done.returncode == 1, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("No: gpt-oss-120b does not train at 32,768 tokens on 1 x H200-141GB,")
    assert first.endswith(" that do safely with host memory, 3 without. Predicted for highwater.")
    assert "What would fit: 2 x H200-141GB" in done.stdout
    assert json.loads(highwater(*asked, "--gpus", "H200", "--json").stdout)["gpus"] == 1
    assert highwater(*asked, "--gpus", "1xH200").stdout == done.stdout


def test_the_fewest_of_every_number_stand_in_the_first_line_and_what_is_tight(highwater):
    asked: dict[str, object] = {"length": "16k", "offload": False, "activations": "gpu"}
    every = {n: highwater_api.predict("Qwen3-32B", gpus=f"{n}xH200", **asked) for n in range(1, 9)}
    safe = [n for n, each in every.items() if any(cell.capacity_tokens for cell in each.cells)]
    risk = every[safe[0] - 1].answer.risk
    said = f"{safe[0]} x H200-141GB are the fewest that do safely ({safe[0] - 1} is {risk})"
    assert safe[0] not in (1, 2, 4, 8), "between two that machines have"
    words = ("Qwen3-32B", "--length", "16k", "--offload", "false", "--activations", "gpu")
    for command in ("predict", "recommend"):
        done = highwater(command, *words, "--gpus", "H200")
        assert done.stdout.splitlines()[0].endswith(f"short; {said}. Predicted for highwater.")
        given = highwater(command, *words, "--gpus", "2xH200").stdout
        assert f"What would fit: {safe[0]} x H200-141GB with" in given.replace("\n", " ")
    (offer,) = highwater_api.cheapest_gpus("Qwen3-32B", gpus=("H200",), **asked).offers
    assert offer.fewest_gpus == safe[0]


@pytest.mark.parametrize("command", ["predict", "recommend"])
def test_beside_one_gpu_that_is_tight_the_fewest_that_are_safe_are_named(highwater, command):
    words = ("Qwen3-8B", "--length", "24k", "--offload", "false", "--activations", "gpu")
    first = highwater(command, *words, "--gpus", "H200").stdout.splitlines()[0]
    named = re.search(
        r"on 1 x H200-141GB \((\d) x H200-141GB are the fewest that do safely\)", first
    )
    assert first.startswith("Tight: ")
    assert highwater(command, *words, "--gpus", f"{named[1]}xH200").stdout.startswith("Yes: ")


def test_without_gpus_here_the_kinds_that_one_can_rent_are_compared(highwater):
    asked = ("predict", "Qwen3-8B", "--lora", "16", *LENGTH)
    done = highwater(*asked)
    assert done.returncode == 0, done.stderr
    length = "65,536 tokens (1.6 x native 40,960)"
    assert f" is the cheapest of these to train Qwen3-8B at {length} for " in done.stdout
    assert "no GPU is here: kinds with a list price are compared" in done.stderr
    offers = json.loads(highwater(*asked, "--json").stdout)["offers"]
    assert len(offers) > 4
    kinds = ",".join(each["device_name"] for each in offers)
    assert highwater(*asked, "--gpus", kinds).stdout == done.stdout
    prices = {each.name: each.hour_dollars for each in gpu_catalog()}
    for each in offers:
        assert each["hour_dollars"] == pytest.approx(each["gpus"] * prices[each["device_name"]])
        assert each["host_memory_bytes"], "a host of any size would train anything"
    assert highwater(*following(done)).returncode == 0


def test_kinds_whose_speed_nobody_knows_are_compared_by_the_hour(highwater):
    done = highwater("predict", "Qwen3-8B", "--lora", "16", *LENGTH, "--trainer", "trl")
    assert re.search(r"native 40,960\) by the hour, [\d.]+ dollars \(its", done.stdout)
    offers = highwater_api.cheapest_gpus(
        "Qwen3-8B", gpus=("H20", "H200", "L40S"), length="64k", lora=16, trainer="trl"
    ).offers
    assert [each.device_name for each in offers] == ["L40S", "H200-141GB", "H20-96GB"]


@pytest.mark.parametrize(
    ("words", "code", "said", "typed"),
    [
        (
            "Llama-3.1-405B --gpus H100",
            1,
            "No: Llama-3.1-405B does not train at 8,192 tokens on 1 x H100-80GB",
            "--gpus H100 ",
        ),
        (
            "Llama-3.1-405B --gpus A100-80GB,H100",
            1,
            "No: Llama-3.1-405B does not train at 8,192 tokens on up to 8 of",
            "",
        ),
        ("Qwen3-8B --gpus RTX-4090 --lora 16 --lora-base nf4", 0, "on 1 x RTX-4090: ", ""),
        ("Qwen3-0.6B --gpus B200,H100", 0, "1 x H100-80GB is the cheapest of these to train", ""),
        ("Qwen2.5-7B --gpus 4xH100,2xH100", 0, "2 x H100-80GB are the fewest of these", "2xH100"),
    ],
    ids=["one of a kind", "several kinds", "four bits are on one GPU alone", "one", "one kind"],
)
def test_the_first_line_names_the_number_that_was_tried(highwater, words, code, said, typed):
    done = highwater("predict", *words.split(), "--length", "8k")
    assert done.returncode == code, done.stderr
    assert said in done.stdout.splitlines()[0]
    assert typed in done.stderr.splitlines()[-1]


def test_of_several_kinds_the_cheapest_comes_first_by_the_catalogs_prices():
    choice = highwater.cheapest_gpus("Qwen3-8B", gpus=KINDS, length="64k")
    by_kind = {each.device_name: each for each in choice.offers}
    assert {*by_kind} == {"A100-80GB", "H100-80GB", "RTX-4090", "H20-96GB"}
    dollars = [each.million_dollars for each in choice.offers]
    known = [each for each in dollars if each is not None]
    assert known == sorted(known)
    assert len(known) == 2
    assert dollars[:2] == known, "what trains for known dollars comes first"
    prices = {each.name: each.hour_dollars for each in gpu_catalog()}
    for name in ("A100-80GB", "H100-80GB"):
        offer = by_kind[name]
        hours = 1e6 / offer.trained.step.tokens_per_s / 3600
        assert offer.million_dollars == pytest.approx(hours * offer.gpus * prices[name])
        every = []
        for gpus in (1, 2, 4, 8):
            cells = highwater.predict("Qwen3-8B", gpus=f"{gpus}x{name}", length="64k").cells
            speeds = [c.step.tokens_per_s for c in cells if c.capacity_tokens and c.step]
            every += [1e6 / max(speeds) / 3600 * gpus * prices[name]] if speeds else []
        assert round(offer.million_dollars, 2) == round(min(every), 2)
        assert offer.fewest_gpus == 1
    assert by_kind["H20-96GB"].million_dollars is None, "it has no list price"
    assert by_kind["H20-96GB"].trained is not None
    assert by_kind["RTX-4090"].trained is None
    assert any("2026-09-25" in note for note in choice.notes)


def test_a_price_for_each_kind_decides_and_a_number_stays(highwater):
    words = ("predict", "Qwen3-8B", "--gpus", "2xA100-80GB,4xH100", *LENGTH, "--price")
    dear = json.loads(highwater(*words, "100,1", "--json").stdout)["offers"]
    cheap = json.loads(highwater(*words, "1,100", "--json").stdout)["offers"]
    assert [each["device_name"] for each in dear] == ["H100-80GB", "A100-80GB"]
    assert [each["device_name"] for each in cheap] == ["A100-80GB", "H100-80GB"]
    assert {each["gpus"] for each in dear} == {2, 4}
    done = highwater(*words, "1,100")
    assert done.stdout.startswith("2 x A100-80GB are the cheapest of these to train Qwen3-8B")
    assert "RunPod" not in done.stderr
    assert "or as typed" in done.stdout
    again = following(done)
    assert again[:4] == ["predict", "Qwen3-8B", "--gpus", "2xA100-80GB"]
    assert highwater(*again).returncode == 0


def test_a_length_has_the_time_and_dollars_of_a_million_tokens_or_of_as_many_as_named(highwater):
    asked = ("predict", "Qwen3-14B", "--gpus", "8xH100", "--length", "16k")
    first, *_ = highwater(*asked, "--price", "2.50").stdout.splitlines()
    took = re.search(r"highwater\. A million tokens take (\d+) s, ([\d.]+) GPU-hours, ", first)
    assert 8 * int(took[1]) / 3600 == pytest.approx(float(took[2]), rel=0.05)
    found = highwater(*asked, "--price", "2.50", "--tokens", "500M", "--json")
    document = json.loads(found.stdout)
    cost = document["cost"]
    assert cost["tokens"] == 500_000_000
    step = highwater_step(document)
    assert cost["time_s"] == pytest.approx(5e8 / step)
    assert cost["dollars"] == pytest.approx(2.5 * 8 * 5e8 / step / 3600)
    told = highwater(*asked, "--tokens", "500M")
    assert f" GPU-hours, {3.49 / 2.5 * cost['dollars']:,.2f} dollars." in told.stdout
    assert "RunPod's list price (Secure Cloud) of 2026-09-25" in told.stderr
    unpriced = highwater("predict", "Qwen3-8B", "--gpus", "H20", "--length", "8k", "--tokens", "1M")
    assert "dollars" not in unpriced.stdout
    assert json.loads(highwater(*asked, "--json").stdout)["cost"] is None


def highwater_step(document: dict[str, object]) -> float:
    found = highwater.predict("Qwen3-14B", gpus="8xH100", length="16k").answer
    assert document["length_tokens"] == 16384
    return found.step.tokens_per_s


def test_tokens_that_are_none_are_refused_and_more_gpus_than_named_noted():
    for tokens in ("0", "5 elephants", "-3"):
        with pytest.raises(HighwaterError):
            highwater.predict("Qwen3-8B", gpus="8xH100", length="8k", tokens=tokens)
    choice = highwater.cheapest_gpus("Qwen3-8B", gpus=("2xH100", "H200"), length="8k", ulysses=[2])
    assert "H200 is named without a number: fewer than 2 are refused here" in choice.notes


@pytest.mark.parametrize(("objective", "share"), [("sft", 0.7), ("dpo", 0.95)])
def test_beside_a_bill_more_sequences_of_a_short_length_cost_less(highwater, objective, share):
    asked = ("predict", "Qwen3-14B", "--gpus", "2xH100-80GB", "--lora", "16", "--length", "1500")
    bill = ("--tokens", "180M", "--price", "2.40", "--objective", objective)
    bills = r"-hours, ([\d.]+) dollars with `(--seq.* \d+)`, or .*-hours, ([\d.]+) dollars with"
    less, flag, plain = re.search(bills, highwater(*asked, *bill).stdout).groups()
    assert f"-hours, {less} dollars." in highwater(*asked, *bill, *flag.split()).stdout
    assert float(less) < share * float(plain)
    assert ", or " not in highwater(*asked, *bill, "--token-budget", "16k").stdout.splitlines()[0]
