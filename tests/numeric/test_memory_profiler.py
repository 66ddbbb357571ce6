"""The memory profiler without a GPU: refused by name, and told where the step is. What it records
on one is in tests/gpu.
"""

import pytest
import torch
from torch import nn

import highwater
from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.training.memory_profiler import TrialProfiler
from highwater.engine.training.out_of_memory import LayerWatch
from highwater.errors import MachineError
from highwater.nouns.profiling import Profiling, SnapshotOrder

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
def test_without_a_gpu_it_is_refused_and_makes_nothing(tmp_path):
    with pytest.raises(MachineError, match="without a GPU"):
        highwater.MemoryProfiler(tmp_path / "snapshots")
    order = SnapshotOrder(directory=str(tmp_path / "snapshots"), profiling=Profiling())
    with pytest.raises(MachineError, match="without a GPU"):
        TrialProfiler(order, rank=0, place="d0r0u0")
    assert not (tmp_path / "snapshots").exists()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What PyTorch was told to record, on a machine that seems to have a GPU."""
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda what, **_: told.append(what))
    monkeypatch.setattr(memory, "_set_memory_metadata", lambda _: None, raising=False)
    return told


def test_a_snapshot_that_cannot_be_written_hides_no_error_of_the_loop(tmp_path, recorder, capsys):
    (tmp_path / "file").touch()
    profiler = highwater.MemoryProfiler(tmp_path / "file")  # below which nothing can be written
    with pytest.raises(torch.OutOfMemoryError, match="the loop's own"), profiler:
        raise torch.OutOfMemoryError("the loop's own")
    assert f"no memory snapshot was written to {profiler.path}: " in capsys.readouterr().err
    with pytest.raises(OSError, match="file"), profiler:
        pass
    assert recorder == ["all", None, "all", None]


class Layered(nn.Module):
    """Three layers that allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden.sum()


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_step_is_in_each_layer_of_both_passes_where_layers_are_recomputed(recomputes):
    model = Layered()
    if recomputes:
        recompute_layers(model.layers)
    heard: list[str] = []
    watch = LayerWatch(heard.append)
    watch.follow(model.layers)
    watch.enter("forward")
    loss = model(torch.ones(2, 4))
    assert heard == [
        "forward",
        *(line for n in range(3) for line in (f"forward of layer {n}", "forward")),
    ]
    heard.clear()
    watch.enter("backward")
    loss.backward()
    assert heard == ["backward", *(f"backward of layer {n}" for n in (2, 1, 0) if recomputes)]
    watch.enter("optimizer")
    assert watch.where == "optimizer"
