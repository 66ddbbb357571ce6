"""``rank_main.py RESULT CASES WORDS...``: what ``CASES.results(*WORDS)`` gives rank 0."""

import ctypes
import gc
import json
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from rank_steps import CPU

from highwater.engine.parallel import mesh as process_mesh

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Source: malloc.h."""

path, module, *words = sys.argv[1:]
torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 20)
for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):  # what is given back is zeroed anew
    ctypes.CDLL(None).mallopt(threshold, 2**25)
process_mesh.join(CPU)
results = import_module(module).results(*words)
if dist.get_rank() == 0:
    Path(path).write_text(json.dumps(results))
process_mesh.leave()
