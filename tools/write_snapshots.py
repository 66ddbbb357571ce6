"""Writes the memory snapshots of ``tests/data/snapshots``: small ones, which no GPU recorded, of
programs whose every allocation is known.

``.venv/bin/python tools/write_snapshots.py``. The form is that of ``torch/cuda/memory.py`` and
``torch/csrc/cuda/Module.cpp``, PyTorch 2.13: shared frames, a list of them for each allocation,
sizes as they were asked for in the trace and as they were rounded in the blocks.

``tests/data/engine_step.pickle`` is of this engine: two steps on the CPU, whose every storage a
dispatch mode recorded with the stack that asked for it, when fused layers lay in ``models/fused``.
Snapshots of that time are read as they were then, whatever the files are called now.
"""

import pickle
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "snapshots"
MIB = 1024**2
SITE = "/opt/venv/lib/python3.12/site-packages"


class Program:
    """A device on which memory is asked for and given back, and the history that PyTorch keeps of
    it.
    """

    def __init__(self, *, is_expandable: bool = False, max_entries: int = 100_000) -> None:
        self.is_expandable = is_expandable
        self.max_entries = max_entries
        self.trace: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self.phase = ""
        self._frames: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._next = 0x7F0000000000

    def stack(self, *frames: tuple[str, int, str]) -> list[dict[str, Any]]:
        """A stack, the innermost frame first: each frame is one dict, the list is always new."""
        return [
            self._frames.setdefault(
                frame, {"filename": frame[0], "line": frame[1], "name": frame[2]}
            )
            for frame in frames
        ]

    def allocate(self, size: int, *frames: tuple[str, int, str]) -> int:
        """Ask for memory: of a free block that is large enough, else of a new segment."""
        rounded = -(-size // 512) * 512
        block = next(
            (
                block
                for segment in self.segments
                for block in segment["blocks"]
                if block["state"] == "inactive" and block["size"] >= rounded
            ),
            None,
        )
        if block is None:
            block = self._segment(-(-rounded // (2 * MIB)) * 2 * MIB)
        self._split(block, rounded)
        block |= {"state": "active_allocated", "requested_size": size}
        block["frames"] = self.stack(*frames)
        self._record("alloc", block["address"], size, frames)
        return block["address"]

    def free(self, address: int, *frames: tuple[str, int, str]) -> None:
        """Give memory back."""
        block = next(
            block
            for segment in self.segments
            for block in segment["blocks"]
            if block["address"] == address and block["state"] == "active_allocated"
        )
        for action in ("free_requested", "free_completed"):
            self._record(action, address, block["requested_size"], frames)
        block |= {"state": "inactive", "requested_size": 0, "frames": []}

    def run_out(self, size: int, device_free: int, *frames: tuple[str, int, str]) -> None:
        """Ask for memory that is not there."""
        self._record("oom", device_free, size, frames)
        entry = self.trace[-1]
        entry["device_free"] = entry.pop("addr")

    def snapshot(self) -> dict[str, Any]:
        """The snapshot as of now."""
        self._record("snapshot", 0, 0, ())
        for segment in self.segments:
            alive = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
            segment["allocated_size"] = segment["active_size"] = sum(b["size"] for b in alive)
            segment["requested_size"] = sum(b["requested_size"] for b in alive)
        return {
            "segments": self.segments,
            "device_traces": [self.trace[-self.max_entries :]],
            "allocator_settings": {
                "PYTORCH_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.is_expandable,
                "pinned_num_register_threads": 1,
                "roundup_power_of_two_divisions": {"1": 0},
            },
            "external_annotations": [],
        }

    def _segment(self, size: int) -> dict[str, Any]:
        address, self._next = self._next, self._next + size + 2 * MIB
        block = {"address": address, "size": size, "requested_size": 0, "state": "inactive"}
        self.segments.append(
            {
                "device": 0,
                "address": address,
                "total_size": size,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": self.is_expandable,
                "frames": [],
                "blocks": [block],
            }
        )
        self._record("segment_map" if self.is_expandable else "segment_alloc", address, size, ())
        return block

    def _split(self, block: dict[str, Any], size: int) -> None:
        rest = block["size"] - size
        if rest:
            blocks = next(s["blocks"] for s in self.segments if block in s["blocks"])
            blocks.insert(
                blocks.index(block) + 1,
                {
                    "address": block["address"] + size,
                    "size": rest,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                },
            )
            block["size"] = size

    def _record(
        self, action: str, address: int, size: int, frames: tuple[tuple[str, int, str], ...]
    ) -> None:
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": 1_780_000_000_000_000 + 100 * len(self.trace),
                "compile_context": "N/A",
                "user_metadata": self.phase,
                "pool_id": (0, 0),
                "frames": self.stack(*frames),
            }
        )


MAIN = ("/work/pretrain.py", 88, "main")
MEGATRON = "/opt/megatron/megatron/core"
LINEAR = (f"{SITE}/torch/nn/modules/linear.py", 134, "forward")
CALL = (f"{SITE}/torch/nn/modules/module.py", 1786, "_call_impl")
MODEL = f"{SITE}/transformers/models/qwen3/modeling_qwen3.py"
STEP = (f"{SITE}/transformers/trainer.py", 4020, "training_step")
TRAIN = ("/work/train.py", 31, "<module>")
ENGINE = (
    "??",
    0,
    "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)",
)


def megatron() -> Program:
    """A rank of Megatron-LM: parameters, a gradient buffer, two layers, and an optimizer."""
    program = Program()
    model = (f"{MEGATRON}/models/gpt/gpt_model.py", 190, "__init__")
    for line in (410, 411):
        program.allocate(
            24 * MIB,
            (f"{MEGATRON}/tensor_parallel/layers.py", line, "__init__"),
            model,
            MAIN,
        )
    program.allocate(
        48 * MIB,
        (f"{MEGATRON}/distributed/param_and_grad_buffer.py", 640, "__init__"),
        (f"{MEGATRON}/distributed/distributed_data_parallel.py", 120, "__init__"),
        MAIN,
    )
    kept = [
        program.allocate(
            10 * MIB,
            (f"{MEGATRON}/tensor_parallel/layers.py", 1010, "forward"),
            (f"{MEGATRON}/transformer/mlp.py", 130, "forward"),
            (f"{MEGATRON}/transformer/transformer_layer.py", 380 + layer, "forward"),
            MAIN,
        )
        for layer in range(2)
    ]
    gathered = program.allocate(
        6 * MIB,
        (f"{MEGATRON}/tensor_parallel/mappings.py", 60, "_gather_along_first_dim"),
        (f"{MEGATRON}/tensor_parallel/layers.py", 470, "forward"),
        MAIN,
    )
    logits = program.allocate(
        40 * MIB,
        (f"{MEGATRON}/tensor_parallel/cross_entropy.py", 40, "calculate_logits_max"),
        (f"{MEGATRON}/tensor_parallel/cross_entropy.py", 130, "forward"),
        MAIN,
    )
    for address in (gathered, logits, *kept):
        program.free(address)
    program.allocate(
        32 * MIB,
        (f"{MEGATRON}/optimizer/distrib_optimizer.py", 300, "build_model_and_main_param_groups"),
        MAIN,
    )
    return program


def trainer() -> Program:
    """Hugging Face's Trainer, out of memory in its backward pass: the logits are still there."""
    program = Program()
    init = (MODEL, 60, "__init__")
    program.allocate(30 * MIB, (f"{SITE}/torch/nn/modules/linear.py", 106, "__init__"), init, TRAIN)
    for line in (118, 119):
        program.allocate(
            30 * MIB,
            (f"{SITE}/torch/optim/adamw.py", line, "_init_group"),
            (f"{SITE}/torch/optim/adamw.py", 220, "step"),
            (f"{SITE}/torch/optim/optimizer.py", 520, "wrapper"),
            TRAIN,
        )
    layers = [
        program.allocate(
            size * MIB, LINEAR, CALL, (MODEL, 81, "forward"), CALL, (MODEL, 262, "forward"), CALL,
            (MODEL, 410, "forward"), CALL, (MODEL, 500, "forward"), STEP, TRAIN,
        )
        for size in (9, 8)
    ]  # fmt: skip
    program.allocate(64 * MIB, LINEAR, CALL, (MODEL, 507, "forward"), STEP, TRAIN)
    loss = (f"{SITE}/transformers/loss/loss_utils.py", 36, "fixed_cross_entropy")
    program.allocate(
        64 * MIB,
        (f"{SITE}/torch/nn/functional.py", 3458, "cross_entropy"),
        loss,
        (MODEL, 511, "forward"),
        STEP,
        TRAIN,
    )
    program.free(layers[0])
    program.allocate(30 * MIB, ("??", 0, "torch::autograd::AccumulateGrad::apply"), ENGINE)
    program.run_out(128 * MIB, 5 * MIB, ("??", 0, "LogSoftmaxBackward0::apply"), ENGINE)
    return program


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, program in (
        ("snapshot_rank00_p0d1c0t0", megatron()),
        ("trainer_out_of_memory", trainer()),
    ):
        with (FOLDER / f"{name}.pickle").open("wb") as file:
            pickle.dump(program.snapshot(), file, protocol=4)


if __name__ == "__main__":
    main()
