"""Training settings: those that are named, a study's, or what is recommended; what is predicted not
to fit is refused with what would.
"""

from pathlib import Path

import msgspec
import pytest

from highwater.errors import MachineError, UsageError
from highwater.nouns.request import request_from
from highwater.nouns.training import training_request_from
from highwater.recommendation.training_settings import (
    ChosenTrial,
    chosen_trial,
    named_settings,
)
from highwater.store.journal import read_study
from highwater.units import GIB
from places import NO_GPU, machine_with

MACHINE = msgspec.structs.replace(
    NO_GPU, host_memory_total_bytes=128 * GIB, host_memory_available_bytes=128 * GIB
)
STUDY = Path(__file__).parents[2] / "docs/results/other_trainers/studies/one-gpu-highwater.jsonl"


def asked(length: str | int, settings: str | None = None):
    values = {"data": ("data.jsonl",), "length": length, "steps": 10, "output": "run"}
    return training_request_from(values | ({} if settings is None else {"settings": settings}))


def on_the_cpu(memory: str, **named):
    fields = {"model": "Qwen3-0.6B", "device": "cpu", "memory": memory, **named}
    return request_from(fields, keywords=True)


def test_what_is_named_is_taken_and_what_is_not_is_recommended():
    named = chosen_trial(on_the_cpu("16GiB", loss="chunked"), asked(4096), MACHINE)
    assert named.spec.settings.loss == "chunked"
    usual = chosen_trial(on_the_cpu("64GiB"), asked(4096), MACHINE)
    assert usual.spec.settings.loss == "full", "the simplest that fits"
    assert usual.predicted.capacity_tokens == 4096


def test_the_simplest_settings_that_fit_are_recommended():
    roomy, tight = (
        chosen_trial(on_the_cpu(memory), asked(16384, "recommended"), MACHINE)
        for memory in ("64GiB", "16GiB")
    )
    assert (roomy.spec.settings.loss, tight.spec.settings.loss) == ("full", "chunked")
    assert tight.predicted.footprint.needed_bytes < roomy.predicted.footprint.needed_bytes


def test_what_is_predicted_not_to_fit_is_refused_with_the_settings_that_would():
    with pytest.raises(MachineError) as refused:
        chosen_trial(on_the_cpu("16GiB", loss="full"), asked(16384), MACHINE)
    assert "do not fit" in refused.value.problem
    assert "--settings recommended" in refused.value.hint
    with pytest.raises(MachineError, match="do not fit") as refused:
        chosen_trial(on_the_cpu("2GiB"), asked(16384), MACHINE)
    assert "--memory" in refused.value.hint


def test_the_rows_of_a_step_are_counted_where_they_lie_in_the_same_memory():
    def chosen(memory_bytes: int, rows: int) -> ChosenTrial:
        request = on_the_cpu(f"{memory_bytes}B", loss="full")
        return chosen_trial(request, msgspec.structs.replace(asked(4096), rows=rows), MACHINE)

    few, many = (chosen(64 * GIB, rows) for rows in (2, 66))
    assert few.rows_bytes == 0
    assert many.rows_bytes == 64 * 4096 * 200
    enough = few.predicted.device_used_bytes + many.rows_bytes // 2
    assert chosen(enough, 2)
    with pytest.raises(MachineError, match="do not fit"):
        chosen(enough, 66)


def test_a_studys_answer_is_taken_for_the_length_that_it_measured():
    study = read_study(STUDY)
    (answer,) = study.answers
    machine = machine_with(1)
    request = request_from({"model": "Qwen3-4B", "memory": "80GiB", "gpus": [1]}, keywords=True)
    found = chosen_trial(request, asked(answer.reach_tokens, str(STUDY)), machine)
    assert found.spec.settings == answer.cell.settings
    assert found.spec.layout == answer.cell.layout
    assert any("measured up to" in note for note in found.notes)
    with pytest.raises(UsageError, match="the longest was") as refused:
        chosen_trial(request, asked(answer.reach_tokens + 4096, str(STUDY)), machine)
    assert f"--length {answer.reach_tokens}" in refused.value.hint


def test_a_studys_memory_is_taken_where_none_is_named():
    study = read_study(STUDY)
    request = request_from({"model": "Qwen3-4B", "gpus": [1]}, keywords=True)
    found = chosen_trial(request, asked(4096, str(STUDY)), machine_with(1))
    assert found.spec.memory_budget_bytes == study.question.memory_budget_bytes == 80 * GIB


def test_a_study_of_another_model_or_device_says_nothing():
    machine = machine_with(1)
    other = request_from({"model": "Qwen3-0.6B", "memory": "80GiB", "gpus": [1]}, keywords=True)
    with pytest.raises(UsageError, match="another model"):
        chosen_trial(other, asked(4096, str(STUDY)), machine)
    with pytest.raises(UsageError, match="says nothing"):
        chosen_trial(on_the_cpu("64GiB"), asked(4096, str(STUDY)), MACHINE)


def test_a_study_of_whole_models_says_nothing_of_adapters_that_are_named_beside_it():
    values = {"model": "Qwen3-4B", "memory": "80GiB", "gpus": [1], "lora": 16}
    request = request_from(values, keywords=True)
    with pytest.raises(UsageError, match="was trained as it is named") as refused:
        chosen_trial(request, asked(4096, str(STUDY)), machine_with(1))
    assert "--settings recommended" in refused.value.hint


def test_settings_are_named_or_taken_from_somewhere_and_never_both():
    request = on_the_cpu("64GiB", recompute="none", lora=8)
    assert named_settings(request) == ("recompute",), "an adapter is what is trained, not how"
    with pytest.raises(UsageError, match="--recompute") as refused:
        chosen_trial(request, asked(4096, "recommended"), MACHINE)
    assert "leave `--recompute` out" in refused.value.hint


def test_one_row_for_each_rank_is_predicted_without_gradients_that_are_added_up():
    def chosen(rows: int | None) -> ChosenTrial:
        request = on_the_cpu("64GiB", loss="chunked")
        return chosen_trial(request, msgspec.structs.replace(asked(4096), rows=rows), MACHINE)

    usual, one, two = (chosen(rows) for rows in (None, 1, 2))
    assert [each.spec.settings.accumulates for each in (usual, one, two)] == [True, False, True]
    assert [each.spec.micro_batches for each in (usual, one, two)] == [2, 1, 2]
    assert one.predicted.device_used_bytes < two.predicted.device_used_bytes
    assert usual.predicted.device_used_bytes == two.predicted.device_used_bytes


def test_rows_over_machines_are_chosen_for_as_those_of_one_machine_are():
    def chosen(rows: int, **machines: object) -> ChosenTrial:
        request = on_the_cpu("16GiB", **machines)
        wanted = msgspec.structs.replace(asked(8192, "recommended"), rows=rows)
        return chosen_trial(request, wanted, MACHINE)

    alone = chosen(1, gpus=(1,))
    both = chosen(2, gpus=(2,), copies=(2,), nodes=2, launcher="srun", rendezvous="/tmp/none")
    assert both.spec.settings == alone.spec.settings
    assert not both.spec.settings.accumulates


def test_rows_that_ranks_cannot_share_are_refused_before_any_data_is_read():
    request = on_the_cpu("64GiB", gpus=(2,))
    with pytest.raises(UsageError, match="3 rows a step, and 2 GPUs") as refused:
        chosen_trial(request, msgspec.structs.replace(asked(4096), rows=3), MACHINE)
    assert refused.value.hint == "use `--rows 2`"
