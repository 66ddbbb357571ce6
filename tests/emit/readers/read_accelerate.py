"""Read ``accelerate.yaml`` in each folder with accelerate's own loader and launcher."""

import json
import os
import sys

from accelerate.commands.config.config_args import load_config_from_file
from launched import shared

answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    loaded = load_config_from_file("accelerate.yaml")
    answers.append(
        {**shared(["--config_file", "accelerate.yaml"]), "num_processes": loaded.num_processes}
    )
json.dump(answers, sys.stdout)
