"""Bytes per token alive at the peak of one decoder layer's recomputation and backward pass.

``python benchmarks/layer.py Qwen3-0.6B`` (the CPU, a minute; ``--device cuda``: the
allocator's own peak) also says whose bytes they are. The engine's own model, its real widths, two
layers and a small vocabulary, in bfloat16: one micro-batch forward and backward. The peak over the
tokens, less the inputs of all layers, is what one layer's backward pass costs.

On the CPU every storage that an operator returns is followed from birth to death. Storages count
whose size is a multiple of the tokens, a prime number, which leaves out weights, their gradients
and tiles of a fixed size. What a kernel allocates for itself and gives back is not seen there. On a
GPU it is the slope of the allocator's peak between two lengths, kernels included.
"""

import argparse
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from highwater.engine.attention.dense import select_kernel
from highwater.engine.attention.registry import register
from highwater.engine.data.batches import Batch, Document, pack
from highwater.engine.models.build import build, read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import Training, backward_of
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from process_environment import environment

LAYERS = 2
VOCABULARY = 1024
CPU_TOKENS = 1021
"""A prime, which is a factor of no weight's size."""
GPU_TOKENS = (32_768, 65_536)
"""Two lengths at which tokens outweigh weights and their gradients at the peak."""


class Item(NamedTuple):
    """One kind of storage: what made it, and how large it is for each token of the batch."""

    made_by: str
    shape: str
    """Dtype and sizes, with T for the tokens."""


class Peak(NamedTuple):
    """The largest sum of living storages."""

    bytes_per_token: float
    phase: str = ""
    during: str = ""
    """The operator that reached it."""
    alive: Mapping[Item, float] = MappingProxyType({})
    """Bytes per token by kind of storage."""


class StorageRecorder(TorchDispatchMode):
    """Follows every storage that an operator returns.

    ``peak`` is the moment at which most bytes were alive.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.phase = "forward"
        self.peak = Peak(0.0)
        self._alive: dict[int, tuple[Item, int]] = {}
        self._total = 0

    def enter(self, phase: str) -> None:
        """Note the phase that the step begins."""
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then look at what it returned."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._see(tensor, str(func).removesuffix(".default"))
        per_token = self._total / self.tokens
        if per_token > self.peak.bytes_per_token:
            during = str(func).removesuffix(".default")
            self.peak = Peak(per_token, self.phase, during, self._by_kind())
        return result

    def _see(self, tensor: Tensor, made_by: str) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return  # a wrapper, whose parts are seen one by one
        key = storage._cdata  # pyright: ignore[reportPrivateUsage] -- the storage's own identity
        if key in self._alive or not self._per_token(storage.nbytes(), tensor.shape):
            return
        shape = ", ".join(_in_tokens(size, self.tokens) for size in tensor.shape)
        item = Item(made_by, f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]")
        self._alive[key] = item, storage.nbytes()
        self._total += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _per_token(self, size: int, shape: torch.Size) -> bool:
        """Whether a storage grows with the tokens.

        Its size is a multiple of them, or it has a row for every token that is trained on: all but
        the first.
        """
        return size > 0 and (size % self.tokens == 0 or self.tokens - 1 in shape)

    def _by_kind(self) -> dict[Item, float]:
        kinds: Counter[Item] = Counter()
        for item, size in self._alive.values():
            kinds[item] += size
        return {item: size / self.tokens for item, size in kinds.items()}

    def _forget(self, key: int) -> None:
        _, size = self._alive.pop(key)
        self._total -= size


def main() -> None:
    """Print a table to stderr and the JSON document to stdout or ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory or catalog name")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure")
    parser.add_argument("--attention-head-groups", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    arguments = parser.parse_args()
    groups = arguments.attention_head_groups
    row = measure(arguments.model, device=arguments.device, head_groups=groups)
    print(table(row), file=sys.stderr)
    text = json.dumps({"environment": environment(), **row}, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def measure(
    name: str, *, device: str, mlp_tiles: int | None = None, head_groups: int = 1
) -> dict[str, Any]:
    """Measure the bytes of a token at the peak; ``layer_bytes_per_token`` are one layer's."""
    with process_mesh.alone(torch.device(device, 0)):
        model, mesh = model_of(name, torch.device(device, 0), mlp_tiles, head_groups)
        peak = _peak_of_tokens(model, mesh) if device == "cpu" else _slope_of_peaks(model, mesh)
    inputs = 2 * model.causal_lm.config.hidden_size * LAYERS
    return {
        "model": name,
        "device": device,
        "bytes_per_token": peak.bytes_per_token,
        "layer_input_bytes_per_token": inputs,
        "layer_bytes_per_token": peak.bytes_per_token - inputs,
        "phase": peak.phase,
        "during": peak.during,
        "alive": [
            {"bytes_per_token": size, "made_by": item.made_by, "shape": item.shape}
            for item, size in sorted(peak.alive.items(), key=lambda pair: -pair[1])
        ],
    }


def table(row: dict[str, Any]) -> str:
    """The measurement, its items largest first, in thousands of bytes a token."""
    names = ("bytes_per_token", "layer_input_bytes_per_token", "layer_bytes_per_token")
    peak, inputs, layer = (f"{row[name] / 1000:.2f}" for name in names)
    lines = [
        f"{row['model']} on {row['device']}: {peak} KB/token at the peak, of which {inputs} are "
        f"the inputs of {LAYERS} layers",
        f"one layer's recomputation and backward pass: {layer} KB/token",
    ]
    if row["during"]:
        lines.append(f"the peak is in {row['phase']}, at {row['during']}")
    items = [
        f"{item['bytes_per_token'] / 1000:7.2f}  {item['shape']:<32}  {item['made_by']}"
        for item in row["alive"]
    ]
    return "\n".join(lines + items)


def model_of(
    name: str, device: torch.device, mlp_tiles: int | None = None, head_groups: int = 1
) -> tuple[Decoder, DeviceMesh]:
    """The engine's model with real widths, and FSDP2 around it as around any other."""
    model = load_model(name)
    shape = model.shape
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kernel = select_kernel(
        device,
        torch.bfloat16,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    mesh = process_mesh.shard_mesh(Layout(), device)
    config = read_config(model.directory, length_tokens=shape.native_length_tokens, rope="auto")
    config.num_hidden_layers, config.vocab_size = LAYERS, VOCABULARY
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    built = build(
        config,
        directory=os.devnull,  # random weights, whatever lies beside the config
        mesh=mesh,
        attention=register(kernel),
        loss="chunked",
        recompute="layer",
        compute_dtype=torch.bfloat16,
        mlp_tiles=mlp_tiles,
        head_groups=head_groups,
    )
    return built, mesh


def _peak_of_tokens(model: Decoder, mesh: DeviceMesh) -> Peak:
    batch = batch_of(CPU_TOKENS)
    training = training_of(model, mesh)
    with StorageRecorder(CPU_TOKENS) as recorder:
        backward_of(training, [batch], enter=recorder.enter)
    return recorder.peak


def _slope_of_peaks(model: Decoder, mesh: DeviceMesh) -> Peak:
    peaks: list[int] = []
    training = training_of(model, mesh)
    for tokens in GPU_TOKENS:
        batch = batch_of(tokens)
        backward_of(training, [batch])  # compiles kernels, and allocates the gradients
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        backward_of(training, [batch])
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return Peak((peaks[1] - peaks[0]) / (GPU_TOKENS[1] - GPU_TOKENS[0]))


def training_of(model: Decoder, mesh: DeviceMesh) -> Training:
    """The training of a model, of which only gradients are asked for."""
    return Training(policy=model, optimizer=torch.optim.SGD(model.parameters()), mesh=mesh)


def batch_of(tokens: int, documents: int = 1) -> Batch:
    """Random tokens, packed in documents of as many each."""
    ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return pack([Document(each, each) for each in ids.chunk(documents)])


def _in_tokens(size: int, tokens: int) -> str:
    if size == tokens - 1:
        return "T-1"
    if size < tokens or size % tokens:
        return str(size)
    return "T" if size == tokens else f"{size // tokens}T"


if __name__ == "__main__":
    main()
