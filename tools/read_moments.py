"""Read what a layer of a family with a gated delta rule takes at the moments that may be its peak,
each kind from one trace, and write it into ``memory/formula/moments.json``:

    python -P tools/read_moments.py [FAMILY...]

Such a trace takes half a minute, so that few can be had and linear equations (tools/learn_moments)
are too many. Its sizes are so unlike that the bytes of an allocation tell the product of sizes that
it is of; what is alive at each allocation is their sum. Small allocations are left out. Takes
minutes; without families those that have such layers are read again.
"""

import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = (str(Path(__file__).parent), str(TESTS / "numeric"), str(TESTS))

import numpy as np
from traces import trace, trial

from highwater.memory.formula.moments import FILE, columns, kind_name, products
from highwater.model.families import EXPERTS_PER_TOKEN, family_row
from highwater.model.layer_kind import AttentionKind, DeltaKind, LayerKind, MlpKind
from highwater.model.model import load_model
from highwater.nouns.events import (
    RESIDENT_THREADS,
    Allocate,
    Enter,
    EventLog,
    Free,
    GiveBack,
    TraceOrder,
    column_sums,
)
from highwater.nouns.layout import DELTA_CHUNK_TOKENS, DELTA_GROUP_TOKENS, Layout
from highwater.nouns.objective import ALL_LINEAR, ATTENTION, DELTA, DELTA_JOINED
from highwater.nouns.settings import Settings
from highwater.trials.traced import fullest_rank
from learn_moments import TILES, UNEVEN, mixture, sums_of

FAMILIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
RANK = 4
TOKENS = 7 * DELTA_GROUP_TOKENS
"""Of a rank: a number of whole groups of the delta rule."""
Bytes = Counter[str]
"""Bytes for each product of sizes."""
SMALL_BYTES = 2**18
"""Allocations below are of no product that counts: rows of weights, numbers of each token."""
OF_KERNEL = Bytes({"T*Q": 8, "T*H": 4})
"""What attention's backward kernel takes for itself where heads share keys, as these families' do:
queries' gradient in float32, keys' and values' for every head, and a number a head."""
RANDOM_SHAPES = 20_000
"""Shapes among which a moment has to be the largest of one to be kept."""


class Case(NamedTuple):
    """A kind of layers, and how they are trained."""

    is_delta: bool
    is_recomputed: bool
    is_divided: bool
    """Two ranks share a sequence by Ulysses."""
    is_frozen: bool = False
    """Adapters are trained alone; of few numbers, so that these do not count."""

    def settings(self, family: str) -> Settings:
        """What its layers are traced with."""
        if self.is_frozen:
            of_delta = (*(DELTA_JOINED if family == "qwen3_next" else DELTA), "out_proj")
            of_attention = of_delta if self.is_delta else ATTENTION
            has_experts = family_row(family).experts is not None
            targets = ",".join(of_attention) if has_experts else ALL_LINEAR
            return Settings(loss="chunked", mlp_tiles=TILES, lora=RANK, lora_targets=targets)
        if self.is_recomputed:
            return Settings(loss="chunked", mlp_tiles=TILES)
        return Settings(loss="chunked", recompute="none")

    @property
    def layout(self) -> Layout:
        """The ranks that share a sequence; of one key head three, which each have a copy of it."""
        ranks = (2 if self.is_delta else 3) if self.is_divided else 1
        return Layout(gpus=ranks, ulysses_degree=ranks)

    def name(self, family: str) -> str:
        """Its name among the layers of a family."""
        return kind_name(
            is_windowed=False,
            is_capped=False,
            is_recomputed=self.is_recomputed,
            is_delta=self.is_delta,
            is_divided=self.is_divided,
            is_frozen=self.is_frozen,
            mlp="shared" if family_row(family).experts else "",
        )


def main() -> None:
    """Read, and write."""
    both = (True, False)
    cases = [Case(*each) for each in product(both, repeat=3)]
    cases += [Case(is_delta, True, shared, True) for is_delta, shared in product(both, both)]
    for family in sys.argv[1:] or FAMILIES:
        layers = {}
        for case in cases:
            try:
                layers[case.name(family)] = of_case(family, case)
            except AssertionError as error:  # another kind stands for it (formula/moments)
                sys.stderr.write(f"{family} without {case.name(family)}: {str(error)[-200:]}\n")
        found = json.loads(FILE.read_text())  # another process may learn other families
        found[family] = {"has_tiles": True, "layers": layers}
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def of_case(family: str, case: Case) -> dict[str, Any]:
    """Moments of a layer, and what it keeps, as bytes for each product of sizes."""
    for number in range(200):
        with tempfile.TemporaryDirectory() as name:
            spec = trial(
                Path(name, "model"),
                config(family, random.Random(number), is_delta=case.is_delta),
                settings=case.settings(family),
                layout=case.layout,
                length_tokens=TOKENS * case.layout.gpus,
            )
            kind = load_model(spec.model_directory).shape.runs[-1].kind
            known = sizes(kind, case)
            if not known:
                continue
            log = trace(TraceOrder(spec=spec, rank=fullest_rank(spec)), Path(name, "trace"))
        kept, alive = read(log, kind, known)
        moments = largest(alive, family, case)
        sys.stdout.write(f"{family}, {case.name(family)}: {len(alive)} allocations\n")
        sys.stdout.flush()
        found = {"kept": written(kept), "moments": [written(alive[each]) for each in moments]}
        return {**found, **({"is_divided": True} if case.is_divided else {})}
    raise AssertionError("no sizes are unlike")


def written(moment: Bytes) -> dict[str, int]:
    """What is there of each product."""
    return {name: count for name, count in sorted(moment.items()) if count}


def config(family: str, drawn: random.Random, *, is_delta: bool) -> dict[str, Any]:
    """The config of a small model whose last two layers are alike; a first one of linear attention
    is in any model of such a family.
    """
    last = "linear_attention" if is_delta else "full_attention"
    kinds = ["linear_attention", *[last] * (1 if is_delta else 2)]
    kv_heads, heads, key_heads = (6, 30, drawn.choice((2, 4))) if is_delta else (1, 15, 3)
    tiny = json.loads(Path(load_model("tiny").directory, "config.json").read_text())
    tiny.pop("architectures", None)
    width = 16 * drawn.randrange(60, 130)
    of_experts = mixture(family, drawn, "shared", width) if family_row(family).experts else {}
    if of_experts:
        of_experts |= dict.fromkeys(EXPERTS_PER_TOKEN, 3)
        of_experts["shared_expert_intermediate_size"] = 16 * drawn.randrange(60, 130)
    return {
        **tiny,
        "model_type": family,
        "hidden_size": 16 * drawn.randrange(30, 60),
        "intermediate_size": width,
        "head_dim": 16 * drawn.choice((3, 5, 7)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * drawn.choice((2, 3)),
        "linear_key_head_dim": 8 * drawn.randrange(8, 14),
        "linear_value_head_dim": 8 * drawn.randrange(8, 14),
        "num_hidden_layers": len(kinds),
        "vocab_size": 1024,
        "pad_token_id": 0,
        "layer_types": kinds,
        **of_experts,
        "mlp_layer_types": ["sparse"] * len(kinds),
    }


def sizes(kind: LayerKind, case: Case) -> dict[int, Bytes]:
    """The product of sizes, or the sum of some, that has each number of bytes; empty where two
    have the same.
    """
    attention, mlp = kind.attention, kind.mlp
    tile = -(-TOKENS * mlp.plain_width // TILES) if case.is_recomputed else None
    attended = attention.key_size
    if attention.delta is None:
        attended = max(attention.kv_heads, case.layout.ulysses_degree) * attention.head_dim
    single = products(
        kind,
        tokens=TOKENS,
        attended_key=attended,
        tile=tile,
        degree=case.layout.ulysses_degree,
    )
    keys = ("T*K",) if attended == attention.key_size else ("T*K", "T*J")
    sums = [{name: 1} for name in single if name not in ("T*G", "T*D", "T", "T*J", *keys)]
    sums += [{name: 1} for name in keys]
    sums += [{"T*Q": 1, name: 1} for name in keys[1:]]
    plain = "T*S" if mlp.is_routed else "T*F"
    for first in ("T", "E"):
        query, key = f"{first}*Q", f"{first}*K"
        sums += [{query: 2}, {query: 1, key: 2}, {query: 2, key: 2}, {query: 1, key: 1}, {key: 2}]
    sums += [{"T*H": 2}, {plain: 2}, {"T*E": 2}]
    if mlp.is_routed:
        sums += [{"T*k*F": 2}, {"X*E*F": 2}]
    if attention.delta is not None:
        sums += [
            *({"g*Q": 1, "g*K": 2}, {"g*Q": 1, "g*P": 1}),
            *({"g*H": DELTA_CHUNK_TOKENS}, {"g": DELTA_CHUNK_TOKENS}),
        ]
    else:
        sums += [{"T*Q": 1, "T*K": 1}]
    found: dict[int, Bytes] = {}
    for each in sums:
        number = sum(count * single[name] for name, count in each.items())
        for element in (2, 4):
            size, named = element * number, Counter({n: element * c for n, c in each.items()})
            if size < SMALL_BYTES and "s" not in each:
                continue
            if size in found and found[size] != named:
                return {}
            found[size] = named
    return found


def read(log: EventLog, kind: LayerKind, known: Mapping[int, Bytes]) -> tuple[Bytes, list[Bytes]]:
    """What a layer keeps, and what is alive beside that at each allocation of the last layer's
    backward pass, weights as they are gathered aside.
    """
    forward, backward = (
        max(n for n, event in enumerate(log.events) if event == Enter(phase))
        for phase in ("forward", "backward")
    )
    begins, ends = last_layer_of(log, backward)
    alive, made = Counter[str](), dict[int, Bytes]()
    kept_before, unknown = dict[int, Bytes](), Counter[str]()
    found = list[Bytes]()
    for number, event in enumerate(log.events[: ends + 1]):
        if number < forward:
            continue
        if isinstance(event, Allocate):
            operator, module = log.operators[event.operator], log.modules[event.module]
            if number < backward and (layer := re.search(r"layers\.(\d+)", module)):
                kept_before.setdefault(int(layer[1]), Counter(alive))
            if operator.startswith("inside "):  # there while the operator runs
                if number >= begins:
                    found.append(Counter(alive))
                    found[-1].update(
                        sums_of(f"{operator}:{event.bytes}", kind, TOKENS)
                        if operator in UNEVEN
                        else OF_KERNEL
                    )
                continue
            bytes_ = known.get(event.bytes) or of_group(event.bytes, known)
            is_gathering = operator == "resize_" or "rotary" in module
            if bytes_ is None or is_gathering:
                if bytes_ is None and event.bytes >= SMALL_BYTES and not is_gathering:
                    unknown[f"{event.bytes} {operator} {module}"] += number >= begins
                continue
            made[event.id] = bytes_
            alive.update(bytes_)
            if number >= begins:
                found.append(Counter(alive))
        elif isinstance(event, (Free, GiveBack)) and event.id in made:
            alive.subtract(made.pop(event.id))
    for each, count in (+unknown).items():
        sys.stderr.write(f"unknown: {count} of {each}\n")
    last = max(kept_before)
    kept, of_all = Counter(kept_before[last]), Counter(kept_before[last])
    kept.subtract(kept_before[last - 1])
    of_all.subtract(kept_before[0])
    of_all.update(kept)
    for each in found:
        each.subtract(of_all)
    return kept, found


def of_group(size: int, known: Mapping[int, Bytes]) -> Bytes | None:
    """The product of a group's tokens that these bytes are of, with up to three before it."""
    for more in (1, 2, 3):
        whole, rest = divmod(size * DELTA_GROUP_TOKENS, DELTA_GROUP_TOKENS + more)
        if not rest and whole in known and any(name.startswith("g") for name in known[whole]):
            return known[whole]
    return None


def last_layer_of(log: EventLog, backward: int) -> tuple[int, int]:
    """From where the last layer is gathered to where its gradients leave it."""
    seen = [
        (number, log.operators[event.operator], log.modules[event.module])
        for number, event in enumerate(log.events)
        if number > backward and isinstance(event, Allocate)
    ]
    first = next(n for n, (_, operator, _) in enumerate(seen) if operator == "resize_")
    copies = ("resize_", "aten._to_copy.default")
    begins = first
    for n in range(first, len(seen)):
        if seen[n][1] not in copies or seen[n][2]:
            break
        if seen[n][1] == "resize_":
            begins = n + 1
    ends = next(n for n in range(begins, len(seen)) if seen[n][1] == "resize_")
    while seen[ends - 1][1] in ("aten._to_copy.default", "aten.empty.memory_format"):
        ends -= 1  # the next layer, and where the gradients go
    return seen[begins][0], seen[ends - 1][0]


def largest(alive: list[Bytes], family: str, case: Case) -> list[int]:
    """Numbers of the moments that are the largest for some shape as models have them."""
    drawn, found = random.Random(0), set[int]()
    names = sorted({name for each in alive for name in each})
    table = np.array([[each[name] for name in names] for each in alive], float)
    for _ in range(RANDOM_SHAPES):
        hidden = drawn.choice((1024, 2048, 3072, 4096, 5120))
        width = hidden * drawn.choice((2, 3, 4, 6, 8)) // 2
        mlp = MlpKind(width=width)
        if family_row(family).experts:
            width = drawn.choice((512, 768, 1024))
            chosen, experts = drawn.choice((8, 10)), drawn.choice((64, 256, 512))
            mlp = MlpKind(
                width=width, experts=experts, experts_per_token=chosen, shared_width=width
            )
        heads, head_dim = drawn.choice((8, 16, 24, 32)), 256
        attention = AttentionKind(
            query_heads=heads, kv_heads=drawn.choice((2, 4, 8)), head_dim=head_dim
        )
        if case.is_delta:
            keys = drawn.choice((8, 16, 32))
            attention = AttentionKind(
                query_heads=keys * drawn.choice((1, 2, 3, 4)),
                kv_heads=keys,
                head_dim=128,
                delta=DeltaKind(key_head_dim=128, taps=4),
            )
        tokens = int(10 ** drawn.uniform(3.3, 6))
        kind = LayerKind(hidden_size=hidden, attention=attention, mlp=mlp)
        of_shape = products(
            kind,
            tokens=tokens,
            attended_key=attention.key_size,
            tile=min(tokens * mlp.plain_width, 2**26) if case.is_recomputed else None,
            degree=drawn.choice((2, 4, 8)) if case.is_divided else 1,
        )
        sums = {
            name: column_sums(tokens, size, resident_threads=RESIDENT_THREADS).partial_bytes
            for name, size in columns(kind).items()
        }
        numbers = {**dict.fromkeys(names, 0), **sums, **of_shape}
        found.add(int((table @ np.array([float(numbers[name]) for name in names])).argmax()))
    return sorted(found)


if __name__ == "__main__":
    main()
