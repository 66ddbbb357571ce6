"""GPU tests: skipped, with the reason, where there is no GPU."""

import gc
import os
from collections.abc import Iterator

import pytest

TRIALS = (
    *("test_trials.py", "test_saves.py", "test_strategies.py", "test_machine_constants.py"),
    *("test_traces.py", "test_recorded_memory.py", "test_ranks_on_one_gpu.py"),
    "test_attention_bench_on_gpu.py",
)
"""All their tests launch trials, or other processes that want a GPU of their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
    # Trials first: they want a GPU that nobody uses, and this process uses it once it has run a
    # kernel.
    items.sort(key=lambda item: item.path.name not in TRIALS and "trial" not in item.name)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if os.environ.get("HIGHWATER_REQUIRE") == "gpu":
        pytest.fail("HIGHWATER_REQUIRE=gpu, and no GPU is visible")
    pytest.skip("no GPU is visible")


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is all of a group, on the first GPU."""
    import torch

    from highwater.engine.parallel import mesh as process_mesh

    with process_mesh.alone(torch.device("cuda", 0)):
        yield
    gc.collect()
    torch.cuda.empty_cache()
