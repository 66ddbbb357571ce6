"""What rank 0 writes of a step: rates by the documents there were, and nothing that JSON has no
number for.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_training import trained

from highwater.engine.data.batches import Document, pack
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.statistics_log import StatisticsLog
from highwater.engine.training.step import Training, train_step
from highwater.model.footprint import step_flops
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import RankMemory, StatisticsFiles, TrialSpec
from trial_specs import trial_in

LENGTHS = (40, 7, 40)
H200_FLOPS_PER_S = 989e12


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with process_mesh.alone(torch.device("cpu")):
        yield trained(tmp_path, "sft")


def test_rates_are_of_the_documents_that_there_were(training, tmp_path):
    micro_batches = [pack([Document(torch.arange(n), torch.arange(n))]) for n in LENGTHS]
    line = written(training, micro_batches, tmp_path, step_time_s=0.25)
    shape = load_model(str(tmp_path)).shape
    flops = sum(
        step_flops(shape, length_tokens=n, sequences=1, settings=Settings()) for n in LENGTHS
    )
    assert line["tokens_per_s"] == sum(LENGTHS) / 0.25
    assert line["model_flops"] == flops
    assert line["mfu"] == pytest.approx(flops / 0.25 / (2 * H200_FLOPS_PER_S))
    assert line["peak_reserved_bytes"] == [123]
    assert "peak_data_segment_bytes" not in line


def test_a_perplexity_past_all_numbers_is_null(training, tmp_path):
    ids = torch.arange(20)
    with torch.no_grad():
        training.policy.head.weight.mul_(1e6)
    line = written(training, [pack([Document(ids, ids)])], tmp_path, step_time_s=1.0)
    assert line["nll"] > 1000
    assert line["ppl_max"] is None


def test_a_full_disk_stops_no_training(training, tmp_path, capsys):
    ids = torch.arange(20)
    log = StatisticsLog(
        spec(tmp_path), StatisticsFiles(path="/dev/full"), training, device_name="CPU"
    )
    for step in (1, 2):
        loss, _ = train_step(training, [pack([Document(ids, ids)])])
        log.write(step, {"loss": float(loss)}, step_time_s=1.0, memory=RankMemory())
    assert capsys.readouterr().out.count("statistics are not written: ") == 1


def written(training: Training, micro_batches: list, folder: Path, *, step_time_s: float) -> dict:
    """The line of a step, on two H200s as far as rates are concerned."""
    files = StatisticsFiles(path=str(folder / "statistics.jsonl"))
    log = StatisticsLog(spec(folder), files, training, device_name="NVIDIA H200")
    loss, _ = train_step(training, micro_batches)
    memory = RankMemory(peak_reserved_bytes=123)
    log.write(1, {"loss": float(loss)}, step_time_s=step_time_s, memory=memory)
    (line,) = Path(files.path).read_text().splitlines()
    return json.loads(line)


def spec(folder: Path) -> TrialSpec:
    return trial_in(folder, device="cuda", memory_budget_bytes=None, layout=Layout(gpus=2))
