"""highwater: the longest context that a model trains with on these GPUs, with which settings."""

import importlib
from typing import TYPE_CHECKING, Any

from highwater.version import __version__ as __version__

if TYPE_CHECKING:
    from highwater.api.data_lengths import data_lengths as data_lengths
    from highwater.api.gpu_choice import cheapest_gpus as cheapest_gpus
    from highwater.api.prediction import predict as predict
    from highwater.api.search import find as find
    from highwater.api.search import open_study as open_study
    from highwater.api.search import run_trial as run_trial
    from highwater.api.training import train as train
    from highwater.engine.attention.modules import BlockSparseAttention as BlockSparseAttention
    from highwater.engine.attention.modules import (
        BlockSparseRingDilatedAttention as BlockSparseRingDilatedAttention,
    )
    from highwater.engine.attention.modules import DilatedAttention as DilatedAttention
    from highwater.engine.attention.registry import register_block_sparse
    from highwater.engine.training.memory_profiler import MemoryProfiler as MemoryProfiler
    from highwater.errors import HighwaterError as HighwaterError
    from highwater.nouns.sparse_pattern import SparsePatternConfig as SparsePatternConfig
    from highwater.pages.guide import guide
    from highwater.pages.guide_page import write_guide
    from highwater.pages.study_page import write_report
    from highwater.pages.study_report import study_report
    from highwater.recommendation.recommend import recommend as recommend

_PUBLIC = {
    "cheapest_gpus": "highwater.api.gpu_choice",
    "data_lengths": "highwater.api.data_lengths",
    "find": "highwater.api.search",
    "predict": "highwater.api.prediction",
    "run_trial": "highwater.api.search",
    "open_study": "highwater.api.search",
    "guide": "highwater.pages.guide",
    "write_guide": "highwater.pages.guide_page",
    "recommend": "highwater.recommendation.recommend",
    "study_report": "highwater.pages.study_report",
    "write_report": "highwater.pages.study_page",
    "train": "highwater.api.training",
    "HighwaterError": "highwater.errors",
    "MemoryProfiler": "highwater.engine.training.memory_profiler",
    "SparsePatternConfig": "highwater.nouns.sparse_pattern",
    "DilatedAttention": "highwater.engine.attention.modules",
    "BlockSparseAttention": "highwater.engine.attention.modules",
    "BlockSparseRingDilatedAttention": "highwater.engine.attention.modules",
    "register_block_sparse": "highwater.engine.attention.registry",
}
__all__ = [
    "BlockSparseAttention",
    "BlockSparseRingDilatedAttention",
    "DilatedAttention",
    "HighwaterError",
    "MemoryProfiler",
    "SparsePatternConfig",
    "__version__",
    "cheapest_gpus",
    "data_lengths",
    "find",
    "guide",
    "open_study",
    "predict",
    "recommend",
    "register_block_sparse",
    "run_trial",
    "study_report",
    "train",
    "write_guide",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'highwater' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
