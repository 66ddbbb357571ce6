"""Learn what a layer, and the loss, of Hugging Face's step takes at the moments that may be its
peak, from traces on one GPU, and write ``trainers/hugging_face.json``:

    python -P tools/learn_hugging_face.py [FAMILY...]

As ``learn_moments.py``, whose models and equations these are: layers are checkpointed; beside what
is there when a step's forward pass begins, and what all layers keep, all that is alive is a layer's
or the loss's. Needs peft, and Liger where it has kernels for a family. Takes minutes a family.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = (str(Path(__file__).parent),)

from highwater.engine.tracer import kernel_stubs, tracer, transformers_step
from highwater.memory.formula.moments import products
from highwater.model.model import load_model
from highwater.nouns.events import EventLog, TraceOrder
from highwater.nouns.settings import Settings
from highwater.trainers.hugging_face import FILE, of_loss
from learn_moments import (
    LAYERS,
    ROWS,
    UNEVEN,
    Kind,
    Sample,
    allocations,
    config,
    enough_alike,
    solved,
    usual_layer,
    whole,
)
from tiny_models import write_model
from trial_specs import trial_of

FAMILIES = ("llama", "qwen3", "qwen2")
NARROW = "lora-bf16"
VARIANTS = tuple(
    f"{training}{kernels}"
    for training in ("lora", NARROW, "nf4", "autocast", "bf16")
    for kernels in ("", " liger")
)
"""How a step trains, and with whose kernels."""
RANDOM_SHAPES = 5_000
OWN_ROWS = (*ROWS, "V", "r*E", "r*F", "r*Q", "r*K")


def main() -> None:
    """Learn, and write."""
    import peft  # noqa: F401 -- once for all traces

    kernel_stubs.put_triton()
    import liger_kernel.transformers  # noqa: F401

    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for family in sys.argv[1:] or FAMILIES:
        for variant in VARIANTS:
            try:
                learned_ = learned(family, variant)
            except (AssertionError, RuntimeError) as error:
                sys.stdout.write(f"{family}, {variant}: not learned: {str(error)[:300]}\n")
                continue
            found.setdefault(variant, {})[family] = learned_
            FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def learned(family: str, variant: str) -> dict[str, Any]:
    """Moments of a layer and of the loss, and what a layer keeps, by products of sizes."""
    alike, names = enough_alike(
        f"{family}, {variant}", lambda number: sample(family, variant, number=number)
    )
    events = min(len(each.loss) for each in alike)  # as many events as all have
    sizes = np.array([[each.sizes[name] for name in names] for each in alike], float)
    kept, moments, loss = (
        solved(sizes, np.array(rows, float))
        for rows in (
            [[each.kept_bytes] for each in alike],
            [[size for _, size in each.alive] for each in alike],
            [[size for _, size in each.loss[:events]] for each in alike],
        )
    )
    return {
        "kept": whole(names, kept[0], OWN_ROWS),
        "moments": [whole(names, moments[n], OWN_ROWS) for n in largest(names, moments, variant)],
        "loss": [
            of_all_layers(whole(names, loss[n], OWN_ROWS)) for n in largest(names, loss, variant)
        ],
    }


def of_all_layers(moment: dict[str, int]) -> dict[str, int]:
    """A moment of the loss with the weights of all layers, which autocast keeps, as one product."""
    weights = {name: moment.pop(name, 0) for name in ("E*Q", "E*K", "E*F")}
    of_one = weights["E*F"] // (3 * LAYERS)
    return moment | ({"L": of_one} if of_one else {})


def sample(family: str, variant: str, *, number: int) -> Sample:
    """One trace of a model of random sizes, in a process of its own."""
    drawn = random.Random(number)
    with tempfile.TemporaryDirectory() as name:
        spec = trial_of(
            write_model(Path(name, "model"), sized(family, drawn, variant)),
            settings=settings(variant, drawn),
            length_tokens=1024 * drawn.choice((1, 2, 4)),
            micro_batches=1,
        )
        shape = load_model(spec.model_directory).shape
        order = TraceOrder(spec=spec, trainer="transformers")
        log = forked(order, Path(name, "log"), is_narrow=variant.startswith(NARROW))
    seen = list(allocations(log))
    forward, backward = (
        max(n for n, (text, _, _) in enumerate(seen) if text == f"enter {phase}")
        for phase in ("forward", "backward")
    )
    static = seen[forward][2]
    last, before = f"layers.{LAYERS - 1}", f"layers.{LAYERS - 2}"
    # a layer keeps its input alone, which is of float32 parameters float32
    width = 4 if variant.startswith("autocast") else 2
    kept = width * spec.length_tokens * shape.hidden_size
    ends = max(n for n in range(forward, backward) if last in seen[n][1])
    begins = next(n for n in range(backward, len(seen)) if last in seen[n][1])
    stops = next(n for n in range(begins, len(seen)) if before in seen[n][1])
    beside = static + LAYERS * kept
    kind, rank = shape.runs[-1].kind, spec.settings.lora or 0
    hidden, tokens = kind.hidden_size, spec.length_tokens
    sizes = {
        **products(kind, tokens=tokens, attended_key=kind.attention.key_size, tile=None),
        **of_loss(tokens, shape.vocab_size, hidden, is_whole=spec.settings.holds_logits),
        "one": 1,
        "D": kind.attention.head_dim,
        "E": hidden,
        "V": shape.vocab_size,
    }
    if rank:
        sizes |= {
            "T*r": tokens * rank,
            "r*E": rank * hidden,
            "r*F": rank * kind.mlp.width,
            "r*Q": rank * kind.attention.query_size,
            "r*K": rank * kind.attention.key_size,
        }
    return Sample(
        sizes=sizes,
        kept_bytes=kept,
        alive=between(seen[begins:stops], beside),
        loss=between(seen[ends + 1 : begins], beside),
    )


def sized(family: str, drawn: random.Random, variant: str) -> dict[str, Any]:
    """The config of a small model; heads divide the hidden size, as Llama's class asks. Liger cuts
    its loss into as many pieces as the vocabulary is times as large as the hidden size.
    """
    kv_heads, usual = drawn.choice((2, 4)), config(family, drawn, Kind(False, False))
    words = 128 * drawn.randint(9, 99)
    if variant.endswith("liger"):
        words = 4 * usual["hidden_size"]
    return {
        **usual,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * drawn.choice((1, 2, 4)),
        "vocab_size": words,
    }


def between(seen: list[tuple[str, str, int]], beside: int) -> tuple[tuple[str, int], ...]:
    """Operators and what is alive with them, beside what is there anyhow."""
    return tuple(
        (name.split(":")[0], size - beside)
        for name, _, size in seen
        if not name.startswith(("enter", *UNEVEN))
    )


def settings(variant: str, drawn: random.Random) -> Settings:
    """What a variant is traced with."""
    training, _, kernels = variant.partition(" ")
    has_adapters = training in ("lora", NARROW, "nf4")
    rank = drawn.choice((8, 16, 32)) if has_adapters else None
    base = "nf4" if training == "nf4" else "bf16"
    narrow = {"parameters": "bf16", "optimizer": "adamw-bf16"} if training == "bf16" else {}
    loss = "chunked" if kernels == "liger" else "full"
    return Settings(loss=loss, lora=rank, lora_base=base, accumulates=False, **narrow)


def forked(order: TraceOrder, path: Path, *, is_narrow: bool) -> EventLog:
    """The trace of an order, made by a child; ``is_narrow`` as in ``_narrow``."""
    child = os.fork()
    if not child:
        code = 1
        try:
            import msgspec

            _once()
            if is_narrow:
                _narrow()
            path.write_bytes(msgspec.json.encode(tracer.trace(order)))
            code = 0
        except BaseException as error:  # noqa: BLE001 -- a process edge
            sys.stderr.write(f"{type(error).__name__}: {str(error)[:400]}\n")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("the tracer failed")
    from highwater.nouns.codec import from_json

    return from_json(path.read_bytes(), EventLog)


def _once() -> None:
    """A step of one pass, as what a layer takes is the same in all; and no second one."""
    whole_step, left = transformers_step.HuggingFaceTraining.step, [1]

    def step(training: Any, micro_batches: Any, enter: Any) -> None:
        if left:
            left.pop()
            whole_step(training, micro_batches, enter)

    transformers_step.HuggingFaceTraining.step = step


def _narrow() -> None:
    """Have adapters in bfloat16 and no autocast, as beside DeepSpeed."""
    wide, autocast = transformers_step._adapt, torch.autocast

    def adapt(model: Any, lora: Any) -> None:
        wide(model, lora)
        model.bfloat16()

    class Off(autocast):
        """One that is never on."""

        def __init__(self, *words: Any, **named: Any) -> None:
            super().__init__(*words, **named | {"enabled": False})

    transformers_step._adapt, torch.autocast = adapt, Off


def largest(names: list[str], moments: Any, variant: str) -> list[int]:
    """Numbers of the moments that are the largest for some shape as models have them."""
    drawn, found = random.Random(0), set[int]()
    for _ in range(RANDOM_SHAPES):
        kind = usual_layer(drawn)
        tokens, vocab = int(10 ** drawn.uniform(3, 6)), drawn.choice((32_000, 128_256, 262_144))
        of_shape = {
            **dict.fromkeys(OWN_ROWS, 0),
            **products(kind, tokens=tokens, attended_key=kind.attention.key_size, tile=None),
            **of_loss(tokens, vocab, kind.hidden_size, is_whole=not variant.endswith("liger")),
            "T*r": tokens * 16,
        }
        found.add(int((moments @ np.array([float(of_shape[name]) for name in names])).argmax()))
    return sorted(found)


if __name__ == "__main__":
    main()
