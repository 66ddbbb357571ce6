"""The layer that a step is in, so that whoever is told of a failure, or of an allocation, can say
which.
"""

from collections.abc import Callable, Iterable

from torch import nn

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes by which FSDP1 and recomputation hold what they wrap."""


class LayerWatch:
    """Follows the decoder layers of a step: two assignments for each layer and pass.

    A layer is entered in the forward pass, and in the backward pass where it is recomputed: its
    backward pass follows, so that it is not left before the next is entered. A backward pass
    without recomputation names no layer.
    """

    def __init__(self, on_change: Callable[[str], None] | None = None) -> None:
        """``on_change`` hears where the step is, ``where``, whenever that changes."""
        self.layer: int | None = None
        self.phase = "setup"
        self._on_change = on_change

    @property
    def where(self) -> str:
        """The phase, and the layer: ``backward of layer 27``."""
        return self.phase if self.layer is None else f"{self.phase} of layer {self.layer}"

    def enter(self, phase: str) -> None:
        """Begin a phase, in no layer yet."""
        self.phase = phase
        self._move(None)

    def follow(self, layers: Iterable[nn.Module]) -> None:
        """Listen to the layers of a model, the first to the last."""
        for number, layer in enumerate(layers):
            inner = _innermost(layer)
            inner.register_forward_pre_hook(self._entering(number), prepend=True)
            inner.register_forward_hook(self._leave)

    def _entering(self, number: int) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._move(number)

        return enter

    def _leave(self, *_: object) -> None:
        if self.phase != "backward":
            self._move(None)

    def _move(self, layer: int | None) -> None:
        self.layer = layer
        if self._on_change is not None:
            self._on_change(self.where)


def _innermost(layer: nn.Module) -> nn.Module:
    """The layer itself, which a recomputation calls too."""
    for name in _WRAPPERS:
        layer = getattr(layer, name, layer)
    return layer
