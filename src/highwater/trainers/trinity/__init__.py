"""Trinity-RFT, whose trainer is verl's actor: a configuration (words.py), and the memory of a step
(law.py).
"""

from highwater.memory.trainers import BundledReplay, TrainerMemory
from highwater.nouns.trainer import TrainerTraits
from highwater.trainers.targets import OF_ALL, OF_LORA, EmitTarget
from highwater.trainers.trinity import law
from highwater.trainers.trinity.words import trinity

PREDICTED = TrainerTraits(
    step="Trinity-RFT's trainer, which is verl's actor",
    is_run=False,
    settings=frozenset(
        (
            *("ulysses", "allocator", "offload", "sequences_per_micro_batch", "token_budget"),
            *("rope", "headroom", "start_length", "resolution", "max_length"),
            *("lora", "lora_alpha", "lora_targets"),
        )
    ),
    traces="bundled",
    targets=("trinity", "verl"),
)
MEMORY = TrainerMemory(
    formula=law.footprint,
    accuracy=law.ACCURACY,
    of_adapters=law.OF_ADAPTERS,
    replay=BundledReplay(covers=law.covers, predictor=law.predictor, accuracy=law.REPLAY_ACCURACY),
    fixed_fields=law.published_fields,
)
TARGET = EmitTarget(
    package="trinity-rft",
    before=("ray status > /dev/null 2>&1 || ray start --head",),
    file="trinity.yaml",
    emit=trinity,
    yours=("what it learns, and from what: `algorithm` and `buffer` in trinity.yaml",),
    predicted_for="trinity",
    knows=OF_ALL | OF_LORA,
)
