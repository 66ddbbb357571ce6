"""Traces trials, each in a process of its own, as always, but forked from this one: it need not
import everything anew.

Started by ``traces.py``. Each line of stdin is a list, in JSON, of the order's file, the events'
and the one that gets what is printed; each line of stdout is the exit status.
"""

import gc
import json
import os
import sys
import threading

from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from highwater.engine.tracer import tracer, trinity_step

IMPORTED = (modeling_qwen3, modeling_qwen3_moe, trinity_step)
"""What a trace imports of the models that are traced here."""


def serve() -> None:
    """Trace one order after the other until stdin ends."""
    assert threading.active_count() == 1, "a thread would be missing in every child"
    gc.freeze()
    for line in sys.stdin:
        order, events, log = json.loads(line)
        child = os.fork()
        if child == 0:
            printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            sys.argv[1:] = [order, events]
            tracer.main()  # never returns
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
