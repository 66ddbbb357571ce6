"""A trainer's configuration in YAML, as its user wrote it, by the names of its fields."""

from pathlib import Path
from typing import Any, cast

import yaml

from highwater.errors import UsageError


def yaml_fields(content: bytes, path: Path, *, hint: str) -> dict[str, Any]:
    """The fields in a file's content.

    Raises UsageError, with this hint, for what is no YAML or has no fields.
    """
    try:
        read: Any = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {str(error).splitlines()[0]}", hint=hint) from error
    if not isinstance(read, dict):
        raise UsageError(f"{path} has no named fields", hint=hint)
    return {str(name): value for name, value in cast(dict[Any, Any], read).items()}
