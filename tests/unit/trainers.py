"""Other trainers' settings as they were recorded from their packages."""

import json
import re

from places import DATA


def recorded(package: str, version: str) -> dict[str, str]:
    """Each setting's type, by its name."""
    document = json.loads((DATA / f"settings_{package}.json").read_text())
    assert (document["package"], document["version"]) == (package, version), (
        "`record_trainers.py` renews it"
    )
    assert re.fullmatch("[0-9a-f]{64}", document["sha256"])
    return document["settings"]
