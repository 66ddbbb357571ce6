"""Asking: what `highwater recommend` is asked about a model on GPUs that a guide is about, whatever their number and the length."""

from typing import Any

from highwater.spec.codec import Noun
from highwater.spec.events import Trainer


class Asking(Noun, frozen=True, kw_only=True):
    """What is known of a source, in the words of ``recommend``."""

    model: str
    """Catalog name, or directory."""
    kind: str | None
    """Of GPUs, in the catalog; None: this machine's, or any of so much memory."""
    gpu_memory_bytes: int | None = None
    """Memory of one, where it is not the catalog's."""
    reserved_bytes: int = 0
    trainer: Trainer = "highwater"
    studies: tuple[str, ...] = ()
    """Files whose trials are taken."""
    settings: tuple[tuple[str, str | int | bool], ...] = ()
    """Fields of ``Request`` that every cell of the source has, and are not the defaults."""

    def arguments(self, *, gpus: int) -> dict[str, Any]:
        """Keywords of ``recommend``, without the length."""
        limits = {"gpu_memory": self.gpu_memory_bytes, "reserved": self.reserved_bytes or None}
        return {
            "model": self.model,
            "gpus": str(gpus) if self.kind is None else f"{gpus}x{self.kind}",
            "trainer": self.trainer,
            **{name: str(value) for name, value in limits.items() if value is not None},
            **dict(self.settings),
            **({"studies": self.studies} if self.studies else {}),
        }

    def words(self, *, gpus: int, length_tokens: int) -> tuple[str, ...]:
        """What is typed to ask the same."""
        asked = self.arguments(gpus=gpus)
        studies = asked.pop("studies", ())
        if asked["trainer"] == "highwater":
            del asked["trainer"]
        words = ["highwater", "recommend", str(asked.pop("model"))]
        for name, value in asked.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        words += ["--length", str(length_tokens), *(["--study", *studies] if studies else [])]
        return tuple(words)
