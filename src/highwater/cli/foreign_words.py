"""Foreign words: what others call a setting (TRL, Hugging Face's Trainer, verl, Axolotl, Unsloth),
and which flag of ours it is, or who does it.

A value is flags, where ours says the same; ``{}`` stands for the value that was typed. A sentence
says who does it. Source: the arguments of TRL, transformers, Axolotl, Unsloth and verl.
"""

from collections.abc import Collection

_TEXT = """\
model: the model is the first word, without a flag
model-name-or-path: the model is the first word, without a flag
base-model: the model is the first word, without a flag
batch-size: --sequences-per-micro-batch {}
per-device-train-batch-size: --sequences-per-micro-batch {}
micro-batch-size: --sequences-per-micro-batch {}
train-batch-size: --rows {}
gradient-accumulation-steps: --micro-batches {}
lr: --learning-rate {}
lr-scheduler-type: --schedule {}
warmup-ratio: a training counts `--warmup-steps`
epochs: a training counts `--steps`, and says how many epochs they are
num-train-epochs: a training counts `--steps`, and says how many epochs they are
max-steps: --steps {}
seq-len: --length {}
max-seq-length: --length {}
sequence-len: --length {}
context-length: --length {}
lora-rank: --lora {}
lora-r: --lora {}
use-peft: --lora 16
qlora: --lora 16 --lora-base nf4
load-in-4bit: --lora 16 --lora-base nf4
target-modules: --lora-targets {}
dtype: computation is in bf16 always; `--parameters` names what parameters are kept in
bf16: computation is in bf16 always; `--parameters` names what parameters are kept in
gradient-checkpointing: layers are recomputed unless `--recompute none` is typed
activation-offloading: --activations host
cpu-offload: --offload
optim: --optimizer {}
sequence-parallel-size: --ulysses {}
context-parallel-size: --ring {}
tensor-parallel-size: `--ulysses` shares sequences; tensors are not split
num-gpus: --gpus {}
n-gpus-per-node: --gpus {}
dataset: --data {}
output-dir: --output {}
save-steps: --save-every {}
eval-steps: --eval-every {}
wandb: statistics of each step are in a file, and `--tensorboard` writes them for TensorBoard
report-to: statistics of each step are in a file, and `--tensorboard` writes them for TensorBoard
deepspeed: FSDP2 shards the states; `--strategy` names another
flash-attn: the fastest kernel that a GPU has is taken, without a flag
packing: documents are packed without padding, always
"""
WORDS: dict[str, str] = {
    word: said for word, _, said in (line.partition(": ") for line in _TEXT.splitlines())
}


def meant(word: str, value: str | None, flags: Collection[str]) -> str | None:
    """What is typed here for a word of others, where a command has these ``flags``; None: nothing
    is known of the word.
    """
    name, _, joined = word.lstrip("-").replace("_", "-").lower().partition("=")
    said = WORDS.get(name)
    if said is None or not said.startswith("--"):
        return said
    typed = said.replace("{}", joined or value or "").strip()
    flag = typed.split()[0]
    if flag in flags:
        return f"use `{typed}`"
    return f"that is {flag} of another command: `highwater --help` lists them"
