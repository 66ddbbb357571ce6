"""Trainer, the engine in a loop of one's own."""

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3Config

import highwater
from engine_models import save_random
from highwater.api.search import prepare_trial
from highwater.engine import Quantity, Trainer, train_step
from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.training.memory_profiler import TrialProfiler, past_budget
from highwater.engine.training.out_of_memory import LayerWatch
from highwater.engine.training.trainer_keywords import KEYWORDS, trial_of
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.environment import Profiling, SnapshotOrder
from highwater.nouns.request import request_from
from highwater.nouns.trial import MemoryBudget, RankMemory
from highwater.units import GIB
from tables import table
from tiny_models import SIZES
from torch_server import SERVER

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"
ROWS = [[[5, 6, 7, 8, 9]], [[9, 8, 7], [6, 5, 4, 3]]]
"""Two micro-batches, one of two documents, shorter than the length."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = SIZES | {"vocab_size": 128, "head_dim": 16, "max_position_embeddings": 512}
    folder = tmp_path_factory.mktemp("model") / "small"
    save_random(Qwen3Config(**sizes, tie_word_embeddings=True), folder)
    return str(folder)


@pytest.fixture
def trainer(model: str) -> Iterator[Trainer]:
    with Trainer(model, length=8, device="cpu", learning_rate=0.01) as made:
        yield made


def test_a_step_takes_documents_that_are_shorter_than_the_length(trainer):
    assert (trainer.rank, trainer.data_rank, trainer.data_parallel_degree) == (0, 0, 1)
    assert trainer.device == torch.device("cpu")
    before = trainer.evaluate(ROWS)
    assert before.counted == 4 + 2 + 3
    done = [trainer.step(ROWS) for _ in range(3)]
    assert [result.tokens for result in done] == [12, 12, 12]
    assert before.loss == pytest.approx(done[0].loss, rel=1e-6)
    assert done[0].loss > done[1].loss > done[2].loss
    assert all(result.gradient_norm > 0 and result.critic_gradient_norm is None for result in done)
    assert trainer.steps_done == 3


def test_what_a_step_cannot_be_of_is_refused_and_trains_nothing(trainer):
    before = trainer.evaluate(ROWS)
    for rows, said in (
        ([], "no micro-batches"),
        ([[]], "not documents of token ids"),
        ([5, 6], "5 as a micro-batch"),
        ([[5, 6]], "not documents of token ids"),
        ([[[1] * 9]], "a document of 9 tokens for a length of 8"),
        ([[[1] * 5, [2] * 5]], "a micro-batch of 10 tokens, and 8 is the most"),
        ([[[128]]], r"token ids outside 0\.\.127"),
        ([[{"input_ids": [1, 2], "label": [1, 2]}]], "the field 'label'"),
        ([[{"input_ids": [1, 2], "labels": [-100, -100]}]], "trains no token"),
    ):
        with pytest.raises(UsageError, match=said) as raised:
            trainer.step(rows)
        assert "`--" not in raised.value.hint, "hints speak in keywords"
    assert (trainer.evaluate(ROWS), trainer.steps_done) == (before, 0)


def test_a_trainer_of_single_micro_batches_takes_one(model):
    with Trainer(model, length=8, device="cpu", micro_batches=1) as trainer:
        assert not trainer.training.keeps_gradients
        with pytest.raises(UsageError, match="adds up no gradients"):
            trainer.step(ROWS)
        assert trainer.step(ROWS[:1]).tokens == 5


@pytest.mark.parametrize(
    ("settings", "said"), table("trainer", "keywords_are_refused_by_name_before_anything")
)
def test_keywords_are_refused_by_name_before_anything_is_built(settings, said, model):
    with pytest.raises(HighwaterError, match=said) as raised:
        Trainer(model, **{"length": 8, "device": "cpu", **settings})
    assert raised.value.hint
    assert "--" not in raised.value.hint.replace("--nproc", ""), "hints speak in keywords"
    assert not dist.is_initialized()


def test_a_trainers_keywords_are_those_of_a_trials_step(model, tmp_path):
    settings = {"loss": "chunked", "offload": True, "objective": "grpo", "kl_estimator": "k3"}
    settings |= {"memory": "8GiB", "device": "cpu", "micro_batches": 3}
    asked = request_from(
        {"model": model, "log_dir": str(tmp_path), "gpus": [1], **settings}, keywords=True
    )
    with Trainer(model, length=8, **settings) as trainer:
        assert trainer.spec == prepare_trial(asked, 8)
    assert {"ulysses", "ring", "copies", "loss", "lora", "dpo_beta", "memory"} <= set(KEYWORDS)
    assert not {"model", "gpus", "steps", "runner", "save_hf", "study", "headroom"} & set(KEYWORDS)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("0,1", Profiling()),
        (7, Profiling(profile_steps=(7,))),
        ({}, Profiling()),
        (
            {"profile_steps": [3], "max_entries": 10, "ranks": [0]},
            Profiling(profile_steps=(3,), max_entries=10, ranks=(0,)),
        ),
        (None, None),
    ],
)
@pytest.mark.parametrize("objective", ["sft", "dpo", "grpo", "ppo", "rw"])
def test_it_takes_the_profiler_of_trials(objective, asked, meant, model, tmp_path, monkeypatch):
    """On a machine that seems to have a GPU; what is recorded on one is in tests/gpu."""
    gpu = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    settings = {"objective": objective, "sequences_per_micro_batch": 2, "memory_profiler": asked}
    spec, _ = trial_of(model, 8, {**settings, "log_dir": str(tmp_path / "logs")}, seed=0)
    directory = str(tmp_path / "logs" / "memory_snapshots")
    wanted = None if meant is None else SnapshotOrder(directory=directory, profiling=meant)
    assert spec.memory_snapshots == wanted
    with pytest.raises(UsageError, match="records rank 1, which no trial has") as refused:
        trial_of(model, 8, {**settings, "memory_profiler": {"ranks": [1]}}, seed=0)
    assert refused.value.hint == "leave `ranks` out of `memory_profiler`, which records every rank"


@pytest.fixture
def recorded(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Trainer, list[str]]]:
    """A Trainer on the CPU that records its steps 0 and 2, and what PyTorch is told to record."""
    told: list[str] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda what, **_: told.append(what))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).touch())
    monkeypatch.setattr(memory, "_set_memory_metadata", lambda _: None, raising=False)
    with Trainer(model, length=8, device="cpu") as trainer:
        order = SnapshotOrder(
            directory=str(tmp_path / "memory_snapshots"), profiling=Profiling(profile_steps=(0, 2))
        )
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            trainer._profiler = TrialProfiler(order, rank=0, place="d0r0u0")
        yield trainer, told
    assert told[-1] is None, "it ends with the Trainer"


def snapshots_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pickle"))


def test_the_steps_that_are_named_are_recorded_and_leave_a_snapshot_each(recorded, tmp_path):
    trainer, told = recorded
    for _ in range(4):
        trainer.step(ROWS)
    trainer.evaluate(ROWS)
    assert told == ["state", "all", "state", "all", "state"]
    assert snapshots_in(tmp_path / "memory_snapshots") == [
        "step_0/snapshot_rank00_d0r0u0.pickle",
        "step_2/snapshot_rank00_d0r0u0.pickle",
    ]


@pytest.mark.parametrize("fails", ["step", "evaluate"])
def test_what_runs_out_of_memory_leaves_a_snapshot_whichever_step_it_is_in(
    recorded, tmp_path, fails
):
    trainer, told = recorded
    trainer.step(ROWS)
    hook = trainer.training.policy.register_forward_pre_hook(_runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(trainer, fails)(ROWS)
    hook.remove()
    assert told[-1] == "state"
    assert snapshots_in(tmp_path / "memory_snapshots") == [
        "step_0/snapshot_rank00_d0r0u0.pickle",
        "step_1/snapshot_rank00_d0r0u0.pickle",
    ]
    trainer.step(ROWS)
    assert trainer.steps_done == 2, "a loop may go on"


def test_a_step_that_is_refused_leaves_no_snapshot(recorded, tmp_path):
    with suppress(UsageError):
        recorded[0].step([[[1] * 99]])
    assert not snapshots_in(tmp_path)


def _runs_out(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory: the hook's own")


def test_a_process_has_one_trainer_at_a_time(model):
    with Trainer(model, length=8, device="cpu") as first:
        with pytest.raises(UsageError, match="in a process group already"):
            Trainer(model, length=8, device="cpu")
        first.step(ROWS)
    first.close()  # once more does nothing
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), Trainer(model, length=8, device="cpu"):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_memory_is_bounded_where_it_is_named_until_the_end(model):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with Trainer(model, length=8, device="cpu"):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with Trainer(model, length=8, device="cpu", memory="8GiB") as trainer:
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 8 * 1024**3
        trainer.step(ROWS)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_learning_rate_is_that_of_the_next_step_for_every_model(model):
    settings = {"objective": "ppo", "critic": True, "weight_decay": 0.0, "device": "cpu"}
    rows = [[{"input_ids": [1, 2, 3, 4], "reward": 1.0}, {"input_ids": [4, 3, 2], "reward": -1.0}]]
    with Trainer(model, length=8, learning_rate=0.25, **settings) as trainer:
        assert trainer.learning_rate == 0.25
        trainer.learning_rate = 0.0
        rates = [group["lr"] for _, each in trainer.training.trained for group in each.param_groups]
        assert len(rates) > 2
        assert set(rates) == {0.0}
        first, second = trainer.step(rows), trainer.step(rows)
        assert first == second, "nothing moves"
        assert first.critic_gradient_norm
        with pytest.raises(UsageError, match="learning rate is nan"):
            trainer.learning_rate = float("nan")


def test_a_loss_that_is_not_finite_names_its_step(trainer):
    trainer.learning_rate = 1e30
    trainer.step(ROWS)
    with pytest.raises(FloatingPointError, match="of step 2 is"):
        trainer.step(ROWS)


def test_a_step_is_train_step_of_its_batches(model):
    with Trainer(model, length=8, device="cpu", learning_rate=0.01) as trainer:
        told = [trainer.step(ROWS) for _ in range(2)]
    with Trainer(model, length=8, device="cpu", learning_rate=0.01) as trainer:
        plain = [train_step(trainer.training, trainer.batches(ROWS)) for _ in range(2)]
    assert [(loss, norm) for loss, norm, *_ in told] == [
        (float(loss), float(norms[0])) for loss, norms in plain
    ]


def test_a_loop_adds_to_numbers_of_its_own_which_are_told_with_the_steps(model):
    own = {
        "my_metric": Quantity(how="sum"),
        "share": Quantity(how="mean", per="n_valid_tokens"),
        "mine": Quantity(how="mean", per="my_metric"),
    }
    with Trainer(model, length=8, device="cpu", quantities=own) as trainer:
        done = trainer.step(ROWS)
        for value in (1.5, torch.tensor(2.5)):
            trainer.add("my_metric", value)
        trainer.add("share", 3)
        trainer.add("mine", 8)
        told = trainer.statistics()
        assert (told["my_metric"], told["share"], told["mine"]) == (4, 3 / 9, 2)
        assert (told["loss"], told["gradient_norm"]) == done[:2]
        assert (told["n_tokens"], told["n_valid_tokens"], told["n_documents"]) == (12, 9, 3)
        assert told["nll"] == pytest.approx(done.loss, rel=1e-6)
        trainer.step(ROWS)
        assert trainer.statistics()["my_metric"] == 0, "each step's own"


def test_only_what_a_loop_declared_is_added_to_and_to_one_step(model):
    own = {"mine": Quantity(how="sum"), "longest": Quantity(how="max")}
    with Trainer(model, length=8, device="cpu", quantities=own) as trainer:
        for name, spelled in (("my_metric", "my_metric"), ("nll", "my_nll"), ("loss", "my_loss")):
            with pytest.raises(UsageError, match=name) as refusal:
                trainer.add(name, 1)
            assert f"quantities={{'{spelled}': " in refusal.value.hint
            assert refusal.value.hint.endswith("use one of mine, longest")
        trainer.add("mine", 1)
        for _ in range(2):
            trainer.step(ROWS)
        with pytest.raises(UsageError, match="added to 2 steps"):
            trainer.statistics()
        trainer.step(ROWS)
        trainer.add("mine", 5)
        assert trainer.statistics()["mine"] == 5, "what was refused is forgotten"
    with pytest.raises(UsageError, match="nll is one of the step's own"):
        Trainer(model, length=8, device="cpu", quantities={"nll": Quantity(how="sum")})
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"objective": "grpo"}, [{"input_ids": [1, 2, 3], "reward": 1.0, "group": 0}] * 2),
        (
            {"objective": "ppo", "critic": True},
            [{"input_ids": [1, 2, 3], "reward": 1.0}, {"input_ids": [3, 2], "reward": 0.0}],
        ),
        ({"objective": "dpo", "sequences_per_micro_batch": 2}, [[1, 2, 3], [1, 3]]),
        ({"objective": "rw", "sequences_per_micro_batch": 2}, [[1, 2, 3], [1, 3]]),
    ],
)
def test_every_objective_tells_its_statistics(model, settings, rows):
    over = ("n_tokens", "n_valid_tokens", "prompt_tokens", "n_documents")
    own = {name: Quantity(how="mean", per=name, group="data") for name in over}
    own = {f"over_{name}": quantity for name, quantity in own.items()}
    with Trainer(model, length=8, device="cpu", quantities=own, **settings) as trainer:
        done = trainer.step([rows])
        for name in own:
            trainer.add(name, 2)
        told = trainer.statistics()
    assert (told["over_n_documents"], told["n_documents"], told["loss"]) == (1, 2, done.loss)
    for name in over:
        count = told[name]
        assert told[f"over_{name}"] == (2 / count if count else None)
    assert told.get("critic_gradient_norm") == done.critic_gradient_norm


def test_random_weights_are_told(model, tmp_path):
    (tmp_path / "config.json").write_bytes(Path(model, "config.json").read_bytes())
    with pytest.warns(UserWarning, match="random weights, of seed 7"):
        trainer = Trainer(tmp_path, length=8, device="cpu", seed=7)
    trainer.close()


@pytest.mark.timeout(280)
def test_the_example_trains_the_same_on_one_process_and_on_two(model):
    two = ("-mhighwater.engine.ranks", "--nproc", "2")
    alone, together = (SERVER.run(*way, str(EXAMPLE), model, within_s=200) for way in ((), two))
    assert alone.returncode == together.returncode == 0, alone.stderr + together.stderr
    assert alone.stdout == together.stdout
    losses = [float(line.split()[3].rstrip(",")) for line in alone.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1, "it learns"


def test_the_page_of_the_library_quotes_the_example_as_it_is():
    page = (ROOT / "docs" / "reference" / "library.md").read_text()
    assert f"```py\n{EXAMPLE.read_text()}```\n" in page


MIB = 2**20
BUDGET = MemoryBudget(
    budget_bytes=1000 * MIB,
    context_bytes=100 * MIB,
    nccl_bytes=50 * MIB,
    allocator_cap_bytes=850 * MIB,
)


@pytest.mark.parametrize(
    ("used_mib", "reserved_mib"), [(None, 900), (1000, 850), (1000, 858), (900, 700)]
)
def test_a_trial_within_its_budget_has_nothing_to_say(used_mib, reserved_mib):
    used = None if used_mib is None else used_mib * MIB
    assert (
        past_budget(
            RankMemory(device_used_bytes=used, peak_reserved_bytes=reserved_mib * MIB), BUDGET
        )
        is None
    )


@pytest.mark.parametrize(
    ("reserved_mib", "why"),
    [
        (850, "what is outside the allocator grew"),
        (860, "whole pages, with which it passed its cap by 10.0 MiB"),
    ],
)
def test_a_trial_past_its_budget_says_who_took_it(reserved_mib, why):
    said = past_budget(
        RankMemory(device_used_bytes=1012 * MIB, peak_reserved_bytes=reserved_mib * MIB), BUDGET
    )
    assert why in said
    assert "1000.0 MiB allowed" in said


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
