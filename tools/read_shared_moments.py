"""Read what a layer of Gemma 4 takes at the moments that may be its peak, each kind from one trace,
and write it into ``memory/formula/moments.json``:

    python -P tools/read_shared_moments.py

Its layers differ within one model and hand keys, values and embeddings to each other, so that no
model of layers alike (tools/learn_moments, tools/read_moments) has them all. The sizes of two small
models are so unlike that the bytes of an allocation tell the product of sizes that it is of. What
the layers share is left out: formula.py counts it. Takes a minute.
"""

import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = (str(Path(__file__).parent), str(TESTS / "numeric"), str(TESTS))

import numpy as np
from traces import trace, trial

from highwater.memory.formula.moments import (
    FILE,
    form_name,
    kind_name,
    mlp_name,
    products,
    score_products,
)
from highwater.model.layer_kind import AttentionKind, LayerKind, MlpKind
from highwater.model.model import load_model
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack, TraceOrder
from highwater.nouns.settings import Settings
from learn_moments import RANDOM_SHAPES

FAMILY = "gemma4_text"
TOKENS = 7 * 512
SLIDING, FULL = "sliding_attention", "full_attention"
COMMON: dict[str, Any] = {
    "model_type": FAMILY,
    "vocab_size": 23 * 128,
    "vocab_size_per_layer_input": 23 * 128,
    "hidden_size": 11 * 32,
    "intermediate_size": 13 * 64,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "sliding_window": 512,
    "pad_token_id": 0,
    "max_position_embeddings": 131_072,
    "enable_moe_block": False,
}
EMBEDDED: dict[str, Any] = {
    **COMMON,
    "layer_types": [SLIDING, FULL] * 5,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 19 * 8,
}
PLAIN: dict[str, Any] = {
    **COMMON,
    "layer_types": [SLIDING, FULL] * 2 + [SLIDING],
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 5,
}
EXPERTS: dict[str, Any] = {
    **PLAIN,
    "enable_moe_block": True,
    "num_experts": 9,
    "top_k_experts": 7,  # times a number of bytes none of the others has
    "moe_intermediate_size": 17 * 32,
}
ADAPTED: dict[str, Any] = {"lora": 11, "lora_targets": "q_proj,k_proj,v_proj,o_proj"}
"""Settings beside a config's fields; of a rank that is in no other product."""
READ: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    (EMBEDDED, (2, 3, 6, 7)),
    (PLAIN, (2, 3)),
    (EXPERTS, (2, 3)),
    (EXPERTS | ADAPTED, (2, 3)),
)
"""Models, and of each a layer of every kind: not the first, after which its cosines are gone; no
layer whose keys later ones read, nor the last one that reads them, which adds its gradients to
none. Experts that are frozen keep less."""
COUNTS = (2, 4, 1, 8, 6, 12)
"""Bytes for a product, the likeliest first: half of a head is one in bfloat16, too."""
Bytes = Counter[str]


def main() -> None:
    """Read, and write."""
    found = json.loads(FILE.read_text())
    layers: dict[str, Any] = {}
    for (config, numbers), is_recomputed in product(READ, (True, False)):
        recompute = "layer" if is_recomputed else "none"
        fields = {name: value for name, value in config.items() if name not in ADAPTED}
        adapters = {name: value for name, value in config.items() if name in ADAPTED}
        with tempfile.TemporaryDirectory() as name:
            spec = trial(
                Path(name, "model"),
                {**fields, "num_hidden_layers": len(config["layer_types"])},
                settings=Settings(loss="chunked", recompute=recompute, **adapters),
                length_tokens=TOKENS,
            )
            shape = load_model(spec.model_directory).shape
            log = trace(TraceOrder(spec=spec), Path(name, "trace"))
        kinds = [run.kind for run in shape.runs for _ in range(run.count)]
        for number in numbers:
            kind = kinds[number]
            kept, alive = read(log, kind, number, len(kinds))
            moments = largest(alive, kind)
            title = kind_name(
                is_windowed=kind.attention.window_tokens is not None,
                is_capped=False,
                is_recomputed=is_recomputed,
                is_frozen=bool(adapters),
                mlp=mlp_name(FAMILY, kind.mlp),
                form=form_name(FAMILY, kind),
            )
            sys.stdout.write(f"{title}: {len(alive)} allocations, {len(moments)} moments\n")
            layers[title] = {"kept": written(kept), "moments": [written(alive[n]) for n in moments]}
    found[FAMILY] = {"has_tiles": False, "layers": layers}
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def written(moment: Bytes) -> dict[str, int]:
    """What is there of each product."""
    return {name: count for name, count in sorted(moment.items()) if count}


def sizes(kind: LayerKind, tokens: int) -> dict[str, int]:
    """Products of the sizes of a layer, those of its scores too."""
    attention = kind.attention
    key = attention.key_size
    found = products(kind, tokens=tokens, attended_key=key, tile=None)
    of_scores = score_products(
        attention, documents=1, length_tokens=tokens, attended_key=key, degree=1
    )
    return {name: size for name, size in (dict(found) | dict(of_scores)).items() if size}


def named(size: int, every: dict[str, int]) -> Bytes:
    """The product of sizes that has so many bytes; nothing where none has."""
    pairs = product(COUNTS, every)
    return next((Counter({n: c}) for c, n in pairs if c * every[n] == size), Counter[str]())


def read(log: EventLog, kind: LayerKind, number: int, layers: int) -> tuple[Bytes, list[Bytes]]:
    """What the layer keeps, and what is alive beside what all up to it keep, at each allocation of
    its backward pass: weights as they are gathered, what is handed from layer to layer and what
    later layers left aside, but for the gradient of its output.
    """
    every = sizes(kind, TOKENS)
    every = {name: every[name] for name in every if name not in ("T", "T*G", "r*l", "r*H")}
    forward, backward = (
        max(n for n, event in enumerate(log.events) if event == Enter(phase))
        for phase in ("forward", "backward")
    )
    alive, at_start = dict[int, Bytes](), dict[int, dict[int, Bytes]]()
    (begins, ends), found = window(log, backward, layers - 1 - number), list[Bytes]()
    carried, up_to_it = set[int](), dict[int, Bytes]()
    hidden = Counter({"T*E": 2})
    for place, event in enumerate(log.events[:ends]):
        if place < forward:
            continue
        if place == begins:
            up_to_it = dict(at_start[number + 1])
            del up_to_it[max(n for n in up_to_it if up_to_it[n] == hidden)]  # the next one's input
            earlier = [n for n in alive if n not in up_to_it]
            carried = {*earlier} - {max(n for n in earlier if alive[n] == hidden)}
        if isinstance(event, Allocate):
            module = log.modules[event.module]
            if place < backward and (layer := re.search(r"layers\.(\d+)", module)):
                at_start.setdefault(int(layer[1]), dict(alive))
            if place < backward and module.endswith("model.norm"):
                at_start.setdefault(layers, dict(alive))
            if log.operators[event.operator] == "resize_":
                continue
            if of := named(event.bytes, every):
                alive[event.id] = of
                if place >= begins:
                    found.append(beside(alive, up_to_it, carried))
        elif isinstance(event, (Free, GiveBack)):
            alive.pop(event.id, None)
    kept = beside(at_start[number + 1], at_start[number], set())
    return Counter({name: count for name, count in kept.items() if name.startswith("T")}), found


def beside(alive: dict[int, Bytes], kept: dict[int, Bytes], carried: set[int]) -> Bytes:
    """Bytes alive beside what is kept, less what is kept no more."""
    found = Counter[str]()
    for each in (n for n in alive if n not in kept and n not in carried):
        found.update(alive[each])
    for each in (n for n in kept if n not in alive):
        found.subtract(kept[each])
    return found


def window(log: EventLog, backward: int, position: int) -> tuple[int, int]:
    """From where a layer is gathered in the backward pass to where its gradients leave it."""

    def gathers() -> Iterator[list[int]]:
        group: list[int] = []
        for place, event in enumerate(log.events):
            if place < backward or not isinstance(event, Allocate):
                continue
            operator = log.operators[event.operator]
            if operator == "resize_":
                group.append(place)
            elif operator != "aten._to_copy.default" and group:
                yield group
                group = []

    begins = list(gathers())[position][-1] + 1
    flat = "aten.empty.memory_format"
    for place in range(begins, len(log.events)):
        event = log.events[place]
        if isinstance(event, Allocate) and not log.modules[event.module]:
            is_flat = log.operators[event.operator] == flat and event.bytes > 2**20
            if is_flat or log.operators[event.operator] == "resize_":
                return begins, place
    raise AssertionError("no gradients leave the layer")


def largest(alive: list[Bytes], kind: LayerKind) -> list[int]:
    """Numbers of the moments that are the largest for some shape as models have them."""
    drawn, found = random.Random(0), set[int]()
    names = sorted({name for each in alive for name in each})
    table = np.array([[each[name] for name in names] for each in alive], float)
    for _ in range(RANDOM_SHAPES):
        hidden = drawn.choice((1024, 1536, 2048, 2560, 4096, 5376))
        heads = drawn.choice((4, 8, 16, 32))
        attention = AttentionKind(
            query_heads=heads,
            kv_heads=max(1, heads // drawn.choice((2, 4, 8))),
            head_dim=kind.attention.head_dim,
            window_tokens=kind.attention.window_tokens and drawn.choice((512, 1024)),
            values_are_keys=kind.attention.values_are_keys,
        )
        embedding = drawn.choice((128, 256, 512)) if kind.embedding_size else 0
        mlp = MlpKind(width=hidden * drawn.choice((2, 3, 4, 6, 8)))
        if kind.mlp.is_routed:
            mlp = MlpKind(
                width=hidden // drawn.choice((1, 2, 4, 8)),
                experts=drawn.choice((8, 32, 128)),
                experts_per_token=drawn.choice((1, 2, 4, 8)),
                shared_width=hidden * drawn.choice((1, 2, 4)) // 2,
            )
        shape = LayerKind(
            hidden_size=hidden, attention=attention, mlp=mlp, embedding_size=embedding
        )
        of_shape = sizes(shape, int(10 ** drawn.uniform(3.3, 6)))
        found.add(int((table @ np.array([float(of_shape.get(n, 0)) for n in names])).argmax()))
    return sorted(found)


if __name__ == "__main__":
    main()
