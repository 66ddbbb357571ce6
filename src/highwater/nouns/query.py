"""Queries: what ``highwater recommend`` is asked about a model on the GPUs of a guide.

A query holds whatever the number of GPUs and the length.
"""

from typing import Any

from highwater.nouns.codec import Record
from highwater.nouns.declaration import words_of
from highwater.nouns.trainer import OURS, TrainerName


class Query(Record, frozen=True, kw_only=True):
    """What is known of a source, in the words of ``recommend``."""

    model: str
    """Catalog name, or directory."""
    kind: str | None
    """Kind of GPUs in the catalog; None: this machine's, or any of so much memory."""
    gpu_memory_bytes: int | None = None
    """Memory of one GPU, where it is not the catalog's."""
    reserved_bytes: int = 0
    trainer: TrainerName = OURS
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
        """Words to type that ask the same."""
        asked = self.arguments(gpus=gpus)
        studies = asked.pop("studies", ())
        if asked["trainer"] == OURS:
            del asked["trainer"]
        words = ["highwater", "recommend", str(asked.pop("model"))]
        for name, value in asked.items():
            words += words_of({name: value})
        words += ["--length", str(length_tokens), *(["--study", *studies] if studies else [])]
        return tuple(words)
