"""highwater: the longest context you can train a model with, on these GPUs, and with which settings."""

import importlib
from typing import TYPE_CHECKING, Any

from highwater.version import __version__ as __version__

if TYPE_CHECKING:
    from highwater.api import find as find
    from highwater.api import open_study as open_study
    from highwater.api import predict as predict
    from highwater.api import run_trial as run_trial
    from highwater.errors import HighwaterError as HighwaterError
    from highwater.guiding import guide as guide
    from highwater.guiding import write_guide as write_guide
    from highwater.recommendation import recommend as recommend
    from highwater.reporting import study_report as study_report
    from highwater.reporting import write_report as write_report

_PUBLIC = {
    "find": "highwater.api",
    "predict": "highwater.api",
    "run_trial": "highwater.api",
    "open_study": "highwater.api",
    "guide": "highwater.guiding",
    "write_guide": "highwater.guiding",
    "recommend": "highwater.recommendation",
    "study_report": "highwater.reporting",
    "write_report": "highwater.reporting",
    "HighwaterError": "highwater.errors",
}
__all__ = [
    "HighwaterError",
    "__version__",
    "find",
    "guide",
    "open_study",
    "predict",
    "recommend",
    "run_trial",
    "study_report",
    "write_guide",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'highwater' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
