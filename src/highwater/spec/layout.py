"""Layout: how many GPUs, and how they share the sequence and the states."""

from highwater.errors import UsageError
from highwater.spec.codec import Noun


class Layout(Noun, frozen=True, kw_only=True):
    """GPUs of one trial and the degrees they are split into."""

    gpus: int = 1
    """Processes, one per GPU (on the CPU: one per worker)."""
    ulysses_degree: int = 1
    """GPUs that share one sequence by all-to-all over heads."""
    ring_degree: int = 1
    """GPUs that share one sequence by rotating K and V."""
    replicate_degree: int = 1
    """HSDP copies; the shards number ``gpus / replicate_degree``."""

    def __post_init__(self) -> None:
        """Raise UsageError unless every degree is positive and divides the GPUs."""
        for name in ("gpus", "ulysses_degree", "ring_degree", "replicate_degree"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="use 1 or more")
        if self.gpus % self.context_degree:
            works = ", ".join(str(d) for d in range(1, self.gpus + 1) if self.gpus % d == 0)
            raise UsageError(f"context degree {self.context_degree} does not divide {self.gpus} GPUs", hint=f"use one of {works}")
        if self.gpus % self.replicate_degree:
            raise UsageError(f"{self.replicate_degree} copies do not divide {self.gpus} GPUs", hint="use `replicate_degree=1`")

    @property
    def context_degree(self) -> int:
        """GPUs that share one sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def data_parallel_degree(self) -> int:
        """Groups of GPUs that each train on their own sequences."""
        return self.gpus // self.context_degree

    @property
    def shard_degree(self) -> int:
        """GPUs over which parameters, gradients and optimizer states are sharded."""
        return self.gpus // self.replicate_degree
