"""Optimizers: what each keeps for a parameter, and what it asks for.

Source of the 8-bit moments' sizes: torchao 0.18, ``optim/subclass_8bit.py`` and ``optim/adam.py``;
of the method: Dettmers et al., https://arxiv.org/abs/2110.02861.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

OptimizerName = Literal["adamw", "adamw-8bit", "adamw-bf16"]
MOMENTS = 2
"""Running means that AdamW keeps: of gradients, and of their squares."""
QUANTIZED_BLOCK = 256
"""Numbers that share a scale in float32; a shard that they do not divide keeps float32 moments."""
LEAST_QUANTIZED = 4096
"""Numbers that a shard has at the least for its moments to be quantized."""
TABLE_BYTES = 4 * 256
"""Bytes of the table of what the 256 codes stand for, which each quantized moment has."""
PIECE = 1 << 24
"""Numbers that are updated at once, whole blocks. A compiled update in 8 bits makes two float32
numbers for each of them, which are gone before the next piece: 128 MiB, where the largest matrix of
a model would have GiB."""


STREAMED = 1 << 22
"""Numbers whose moments a GPU has at once where they are in host memory: 16 MiB each way for each
of them, long enough for the link's full speed."""
STREAMED_BUFFERS = 2
"""Buffers that they come through: one is filled while the other goes back."""


class OptimizerTraits(NamedTuple):
    """What an optimizer keeps, and needs."""

    words: str
    moment_bytes: int
    """Bytes of one moment of one number. Of 8 bits are those of matrices whose shards
    ``QUANTIZED_BLOCK`` divides; other moments are then in float32."""
    is_exact: bool
    """Whether its update is AdamW's in float32."""
    package: str | None = None
    """What has to be installed for it."""
    eager_bytes: int = 0
    """Bytes that an update which is not compiled makes for each number that it moves at once: read
    of trainings on the CPU of models of 9, 20 and 33 million parameters."""

    @property
    def is_quantized(self) -> bool:
        """Whether moments are codes with a scale for each block."""
        return self.moment_bytes == 1

    def moments_bytes(self, numbers: int) -> int:
        """Bytes of both moments of one shard with so many numbers."""
        if not self.is_quantized:
            return MOMENTS * self.moment_bytes * numbers
        if numbers < LEAST_QUANTIZED or numbers % QUANTIZED_BLOCK:
            return MOMENTS * 4 * numbers
        return MOMENTS * (numbers + 4 * numbers // QUANTIZED_BLOCK + TABLE_BYTES)


OPTIMIZERS: Mapping[OptimizerName, OptimizerTraits] = {
    "adamw": OptimizerTraits("AdamW in float32", moment_bytes=4, is_exact=True),
    "adamw-8bit": OptimizerTraits(
        "AdamW with moments of 8 bits",
        moment_bytes=1,
        is_exact=False,
        package="torchao",
        eager_bytes=48,
    ),
    "adamw-bf16": OptimizerTraits(
        "AdamW with moments in bfloat16",
        moment_bytes=2,
        is_exact=False,
        package="torchao",
        eager_bytes=28,
    ),
}
"""The optimizers, by the name that a user types."""
