"""Logits of Hugging Face directories, by whatever transformers runs this: nothing else of the
project is imported.

``python logits.py OUT DIRECTORY...`` writes one safetensors file: the logits of ``TOKENS`` for each
directory, by its name; of a sequence classifier they are the last token's. Missing and unexpected
weights are an error, and so is another class than the config names.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

TOKENS = [number * 7 % 97 for number in range(200)]
"""Past the native length of the tiny models."""


def main() -> None:
    torch.set_num_threads(1)
    logits = {}
    for directory in sys.argv[2:]:
        (architecture,) = json.loads((Path(directory) / "config.json").read_text())["architectures"]
        classifier = architecture.endswith("ForSequenceClassification")
        kind = (
            transformers.AutoModelForSequenceClassification
            if classifier
            else transformers.AutoModelForCausalLM
        )
        model, loading = kind.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
        assert type(model).__name__ == architecture
        assert not any(
            loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        ), loading
        with torch.no_grad():
            logits[Path(directory).name] = (
                model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False)
                .logits[0]
                .contiguous()
            )
    save_file(
        logits,
        sys.argv[1],
        metadata={"transformers": transformers.__version__, "torch": torch.__version__},
    )


if __name__ == "__main__":
    main()
