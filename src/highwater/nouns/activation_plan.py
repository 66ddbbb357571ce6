"""Activation plan: where layers keep what their backward pass needs, and what is where when."""

from typing import Literal

from highwater.nouns.codec import Record

Activations = Literal["gpu", "host"]
HOST_SHARE = 0.85
"""Share of a machine's memory, or of its control group's, that activations may take."""


class ActivationPlan(Record, frozen=True, kw_only=True):
    """Where the activations of so many layers lie; layers count from 0."""

    layers: int
    layers_on_gpu: int
    """The last layers, whose activations stay on the GPU; all of them without host memory."""

    @property
    def layers_on_host(self) -> int:
        """The first layers, whose activations leave for the host."""
        return max(0, self.layers - self.layers_on_gpu)

    def first_on_gpu(self, layer: int) -> int:
        """The first layer whose activations are on the GPU while ``layer`` goes backward: with host
        memory the one before it, whose are on their way back.
        """
        return max(0, min(layer - 1, self.layers_on_host)) if self.layers_on_host else 0
