"""The catalog of models: their names, the Hub's ids that mean the same shape, and where each shape
was read.

``catalog/models.json`` has a row for each, ``catalog/models/NAME/config.json`` its shape.
"""

import json
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path

from highwater.nouns.codec import Record, from_builtins

_OFFERED = 3
"""Names that an error offers in the place of one that no model has."""
_ALIKE = 0.75
"""Share of letters from which a name may be meant by another."""


class CatalogModel(Record, frozen=True, kw_only=True):
    """One model of the catalog."""

    name: str
    """The name in tables and log paths."""
    hub_id: str | None = None
    """Its id on the Hugging Face Hub; None of a model that is on no hub."""
    also: tuple[str, ...] = ()
    """Ids on the Hub of models with the very same shape: instruction-tuned, renamed, distilled."""
    published_parameters: float | None = None
    """Parameters in billions, as its card or paper has them."""
    source: str
    """Where its ``config.json`` was read."""

    @property
    def directory(self) -> Path:
        """The directory that holds its ``config.json``."""
        return Path(str(files("highwater.model") / "catalog" / "models" / self.name))

    @property
    def hub_ids(self) -> tuple[str, ...]:
        """Every id of the Hub that means its shape."""
        return (*(() if self.hub_id is None else (self.hub_id,)), *self.also)


@cache
def model_catalog() -> tuple[CatalogModel, ...]:
    """Every model whose shape ships with the package, in the order of its file."""
    text = (files("highwater.model") / "catalog" / "models.json").read_text(encoding="utf-8")
    return tuple(from_builtins(entry, CatalogModel) for entry in json.loads(text))


def catalog_names() -> list[str]:
    """Names of the models whose shapes ship with the package, in alphabetical order."""
    return sorted(model.name for model in model_catalog())


def catalog_model(name: str) -> tuple[str, CatalogModel] | None:
    """The model of a catalog name or of a Hub id, in any case, or of an id's last part; beside it
    the name as the catalog spells it.
    """
    return _spellings().get(name.lower())


def near_names(name: str) -> list[str]:
    """Names of the catalog that somebody may have meant, of as many models, the nearest first: ids
    for an id, short names for a short one.
    """
    typed = name.lower()
    alike = [each for each in _spellings() if ("/" in each) == ("/" in typed)]
    found = get_close_matches(typed, alike, n=len(alike), cutoff=_ALIKE)
    by_model: dict[str, str] = {}
    for each in found:
        spelled, model = _spellings()[each]
        by_model.setdefault(model.name, spelled)
    return list(by_model.values())[:_OFFERED]


@cache
def _spellings() -> dict[str, tuple[str, CatalogModel]]:
    """Every name in lower case: a model's own before those that are another's last part."""
    spellings: dict[str, tuple[str, CatalogModel]] = {}
    for model in model_catalog():
        spellings[model.name.lower()] = (model.name, model)
        spellings |= {each.lower(): (each, model) for each in model.hub_ids}
    for model in model_catalog():
        for each in model.hub_ids:
            short = each.rpartition("/")[2]
            spellings.setdefault(short.lower(), (short, model))
    return spellings
