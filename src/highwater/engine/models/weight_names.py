"""Names of weights: what a family's files call its tensors, read as the names in its modules.

transformers keeps the table (``conversion_mapping.py``): prefixes that were renamed, and experts
that files keep apart and modules hold in one tensor. Its renamings are taken as they are. A tensor
of one expert gets a name of its own, whatever the file calls it: ``experts.3.gate_proj.weight``,
``up_proj`` or ``down_proj``.
"""

import re
from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from highwater.engine.activations.recompute import PREFIX as RECOMPUTE_PREFIX
from highwater.engine.parallel.fsdp1 import PREFIX as FSDP1_PREFIX
from highwater.errors import ModelError
from highwater.nouns.lora import BASE_PREFIX

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def names_in_model(causal_lm: PreTrainedModel, saved: Iterable[str]) -> dict[str, str]:
    """The name in the model of every saved tensor, or the one that it would have there.

    Raises ModelError for tensors that the family puts together in a way that is not known here.
    """
    transforms = get_model_conversion_mapping(causal_lm)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    own = causal_lm.state_dict()
    prefix = causal_lm.base_model_prefix
    names: dict[str, str] = {}
    for name in saved:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if renamed not in own and name in own:
            names[name] = name
        elif renamed in own and pattern is not None:
            names[name] = _of_one_expert(causal_lm, name, renamed, by_pattern[pattern], pattern)
        else:
            names[name] = renamed if renamed in own else name
    return names


def _of_one_expert(
    causal_lm: PreTrainedModel, name: str, target: str, converter: WeightConverter, pattern: str
) -> str:
    experts, _, fused = target.rpartition(".")
    kinds = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    number, parts = _EXPERT.search(name), _PARTS.get(fused, ())
    is_known = kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    if not is_known or number is None or len(parts) != len(converter.source_patterns):
        raise ModelError(
            f"{causal_lm.config.model_type} makes {target} of {name} and others in its files in a "
            f"way that is not supported",
            hint="save the model with transformers' `save_pretrained(..., "
            "save_original_format=False)`, and use that directory",
        )
    return f"{experts}.{number[1]}.{parts[converter.source_patterns.index(pattern)]}.weight"


def name_in_files(name: str) -> str:
    """A parameter's name in our model, as Hugging Face's files have it."""
    for added in (RECOMPUTE_PREFIX, FSDP1_PREFIX, BASE_PREFIX):
        name = name.replace(added, "")
    return name.removeprefix("causal_lm.")
