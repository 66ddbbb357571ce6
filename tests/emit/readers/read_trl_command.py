"""Read ``trl.yaml`` in each folder as another command of TRL's does."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import yaml
from launched import environment

answers = []
for folder in sys.argv[2:]:
    os.chdir(folder)
    with environment({}):
        parser = import_module(f"trl.scripts.{sys.argv[1]}").make_parser(prog="trl")
        # without a GPU, bf16 is refused but for the CPU
        words = ["--config", "trl.yaml", "--use_cpu", "true"]
        *parsed, _, _ = parser.parse_args_and_config(
            words, return_remaining_strings=True, separate_remaining_strings=True
        )
        names = yaml.safe_load(Path("trl.yaml").read_text())
        answers.append(
            {name: getattr(each, name) for each in parsed for name in names if hasattr(each, name)}
        )
json.dump(answers, sys.stdout, default=str)
