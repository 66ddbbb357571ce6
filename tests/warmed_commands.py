"""A process that imports this has answered a command of each family: what is forked from it finds
its imports made, catalogs read, and the parser, decoders and traces there.
"""

import contextlib
import io

from highwater.cli.app import main

GPUS = "--gpus 4xA100-80GB"
ANSWERED = (
    f"predict Qwen3-8B {GPUS} --explain",
    f"predict Qwen3-0.6B {GPUS} --trainer trinity --length 8k",
    f"recommend Qwen3-8B {GPUS} --length 8k",
    f"emit --for trl Qwen3-0.6B {GPUS} --length 8k",
    f"guide --predict Qwen3-0.6B {GPUS}",
    "find Qwen3-0.6B --device cuda --memory 80GiB --dry-run",
    "models",
)

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for command in ANSWERED:
        assert main(command.split()) == 0, command
