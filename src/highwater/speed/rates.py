"""Rates: what one kind of GPU does in a second, and of which of these figures somebody measured it.

Only H200s were measured. Others are taken to reach the same shares of what their data sheets say,
attention too: cuDNN's kernels reach 61 % of an H200's FLOP/s, FlashAttention-2 50 to 73 % of an
A100's (https://arxiv.org/abs/2307.08691).
"""

import json
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

from highwater.nouns.codec import Record, from_builtins
from highwater.nouns.hardware import kind_of

Basis = Literal["measured", "scaled"]
"""Whether the rates are of such a GPU, or of an H200 times what the data sheets differ by."""
MEASURED = "H200-141GB"
_TFLOPS_OF_H200 = 989.0
"""Dense bf16, as the catalog has them."""


BASIS_IN_WORDS: dict[Basis, str] = {
    "measured": "a step's time is predicted too, from what H200s do in a second: of 44 trials that "
    "were held out half were within 3 %, 95 % within 16 %; with offload the host decides, and "
    "trials beside others were up to 4 times as slow (docs/results/speed)",
    "scaled": "a step's time is predicted too, from what an H200 does in a second times what the "
    "data sheets differ by: of other kinds eight trials on H100s alone tell: three 3 to 5 % "
    "off, five with offload 1 to 23 % (docs/results/speed)",
}
"""How good a predicted time is, as a note says it."""


class Sheet(Record, frozen=True, kw_only=True):
    """What a data sheet says of a kind of GPU, besides its FLOP/s (nouns/catalog/gpus.json)."""

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """One way, to the other GPUs of a machine: NVLink, or PCIe where there is none."""
    host_bytes_per_s: float
    """One way, to and from pinned host memory: PCIe's nominal rate."""
    source: str


class Rates(NamedTuple):
    """What a GPU does in a second, as a step of our engine gets it."""

    matmul_flops: float
    attention_flops: float
    """Forward, of the causal half; products alone are counted."""
    attention_backward_flops: float
    memory_bytes: float
    link_bytes: float
    host_bytes: float
    basis: Basis


_OF_H200 = Rates(
    matmul_flops=620e12,
    attention_flops=600e12,
    attention_backward_flops=540e12,
    memory_bytes=3.0e12,
    link_bytes=250e9,
    host_bytes=45e9,
    basis="measured",
)
"""Attention, links and host: read on H200s (docs/results/speed). Matrix products and passes over
memory: fitted to the trials that docs/results/speed/steps.py calls so."""


@cache
def sheets() -> dict[str, Sheet]:
    """The data sheets, by the catalog's name of the kind: ``rates.json`` beside this file."""
    text = (files("highwater.speed") / "rates.json").read_text(encoding="utf-8")
    return {each.name: each for each in (from_builtins(row, Sheet) for row in json.loads(text))}


def rates_of(device_name: str) -> Rates | None:
    """The rates of GPUs of a driver's name, or the catalog's; None of a kind that no data sheet is
    known of.
    """
    kind, measured = kind_of(device_name), sheets()[MEASURED]
    sheet = None if kind is None else sheets().get(kind.name)
    if kind is None or sheet is None or kind.bf16_dense_tflops is None:
        return None
    if sheet is measured:
        return _OF_H200
    flops = kind.bf16_dense_tflops / _TFLOPS_OF_H200
    return Rates(
        matmul_flops=_OF_H200.matmul_flops * flops,
        attention_flops=_OF_H200.attention_flops * flops,
        attention_backward_flops=_OF_H200.attention_backward_flops * flops,
        memory_bytes=_OF_H200.memory_bytes * sheet.memory_bytes_per_s / measured.memory_bytes_per_s,
        link_bytes=_OF_H200.link_bytes * sheet.link_bytes_per_s / measured.link_bytes_per_s,
        host_bytes=_OF_H200.host_bytes * sheet.host_bytes_per_s / measured.host_bytes_per_s,
        basis="scaled",
    )
