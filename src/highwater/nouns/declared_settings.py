"""Every setting that a user can name, declared once: what its value is, which commands take it, its
help, its label.

The grammar of the command line, the schema of ``--config``, the refusals and the labels of rungs
read these rows. A new setting is a row, its fields (of ``Request``, and of ``Settings`` or
``Hyperparameters`` where a rung or an optimizer has it), and whoever acts on it.
"""

from collections.abc import Mapping
from typing import Literal

from highwater.nouns import declaration as kinds
from highwater.nouns.declaration import CommandName, Setting

Topic = Literal["model", "trial", "lengths", "search", "machines", "optimizer", "objective"]

_FIND: tuple[CommandName, ...] = ("find",)
_TRY: tuple[CommandName, ...] = ("try",)
_RUN: tuple[CommandName, ...] = ("find", "try")
"""Commands that run trials, for settings that no prediction depends on, and for ``gpus`` and
``memory``, in the place of which predictions have flags of their own."""
_TRAINED: tuple[CommandName, ...] = ("find", "try", "train")
"""The same, where a whole training has them too."""
_ACROSS: tuple[CommandName, ...] = ("find", "train")
"""Those that several machines can run."""
_LENGTHS: tuple[CommandName, ...] = ("find", "predict")
_PREDICT: tuple[CommandName, ...] = ("find", "try", "predict")
_STEP: tuple[CommandName, ...] = ("find", "try", "predict", "recommend", "emit")
"""All that are about a trial's step; a training has rows of its own."""


def _number(name: str, metavar: str, help_: str) -> Setting:
    """A hyperparameter."""
    return Setting(name, help_, kinds.NUMBER, commands=_TRAINED, metavar=metavar)


TOPICS: Mapping[Topic, tuple[Setting, ...]] = {
    "model": (
        Setting(
            "model",
            "directory of a Hugging Face model, its id on the Hub such as Qwen/Qwen2.5-7B, or a "
            "catalog name such as Qwen3-0.6B",
            kinds.MODEL,
        ),
    ),
    "trial": (
        Setting(
            "trainer",
            "what is tried: this package's engine, or a trainer that is started from outside",
            commands=_RUN,
            any_other="command",
        ),
        Setting(
            "command",
            "--trainer command: what starts it, with {length} and other values of the trial in its "
            "words; no shell runs it. --trainer accelerate: the script that it launches, likewise. "
            "any other trainer: the program, where it is not its own name in PATH",
            kinds.COMMAND,
            commands=_RUN,
        ),
        Setting(
            "trainer_config",
            "configuration of the trainer, your own, whose other fields stay",
            kinds.FILE,
            commands=_RUN,
            example="base.yaml",
        ),
        Setting(
            "done_pattern",
            "what in the trainer's log shows that the steps are done, with a group `step` for "
            "their number; '': exit status 0 does; default: the usual progress lines",
            kinds.PATTERN,
            commands=_RUN,
        ),
        Setting(
            "gpus",
            "GPU counts to search; default: the powers of two up to those present",
            kinds.COUNTS,
            commands=_TRAINED,
            helps={
                "train": "how many GPUs train; default: all that are here; on the CPU processes"
            },
        ),
        Setting(
            "ulysses",
            "Ulysses degrees (SP): GPUs that share one sequence",
            kinds.COUNTS,
            defaults=dict.fromkeys(
                ("predict", "recommend", "emit"), "every degree that divides GPUs and heads"
            ),
        ),
        Setting(
            "ring",
            "ring degrees: GPUs, or groups of --ulysses GPUs, that share one sequence by passing "
            "keys and values on",
            kinds.COUNTS,
        ),
        Setting(
            "copies",
            "copies of what FSDP2 shards (HSDP): GPUs / copies shards, one copy a node for example",
            kinds.COUNTS,
        ),
        Setting(
            "memory",
            "bound on the memory of each GPU, for example 79.15GiB; on the CPU of each process",
            kinds.SIZE,
            commands=_TRAINED,
            in_base_units="memory_bytes",
        ),
        Setting(
            "loss",
            "keep only rungs with this loss; default: the whole ladder",
            helps={
                "train": "logits of all tokens at once, or of a chunk at a time; default: full, or "
                "what is recommended where no setting is named"
            },
            labels={"chunked": "chunked"},
        ),
        Setting(
            "allocator",
            "keep only rungs with this allocator; default: the whole ladder",
            helps={
                "train": "PyTorch's allocator of GPU memory; default: native, or what is "
                "recommended where no setting is named"
            },
            labels={"expandable": "Env"},
        ),
        Setting(
            "recompute",
            "activations recomputed in the backward pass",
            labels={"layer": "", "none": "no-recompute", "all-but-attention": "attention-kept"},
            other_label="recompute-{}",
        ),
        Setting(
            "mlp_tiles",
            "tiles over the tokens that an MLP goes in; default: as recompute has them for free",
            kinds.COUNT,
            example=8,
            labels={None: ""},
            other_label="mlp-tiles-{}",
        ),
        Setting(
            "attention",
            "dense, or block_sparse: each block of tokens reads the blocks that a pattern keeps, "
            "which changes the model",
            labels={"dense": "", "block_sparse": "block-sparse"},
        ),
        Setting(
            "pattern_type",
            "block_sparse: which blocks are kept",
            labels={"dilated_sparse": ""},
            other_label="{}",
        ),
        Setting(
            "sparsity_ratio",
            "block_sparse: share of earlier blocks that is KEPT, or adaptive (5 % to 64k tokens, "
            "2 % to 128k, 1 % above); default: 0.1, or what the window gives",
            kinds.SHARE,
            labels={None: ""},
            other_label="kept-{}",
        ),
        Setting(
            "block_size",
            "block_sparse: tokens of a block",
            kinds.COUNT,
            example=128,
            labels={128: ""},
            other_label="block-{}",
        ),
        Setting(
            "local_window_size",
            "block_sparse: tokens that local_window and global_local read, back from each",
            kinds.COUNT,
            example=512,
            labels={512: ""},
            other_label="window-{}",
        ),
        Setting(
            "global_tokens",
            "block_sparse: first tokens of a document, which global_local reads from everywhere",
            kinds.COUNT,
            example=64,
            labels={64: ""},
            other_label="global-{}",
        ),
        Setting("strategy", "how parameters, gradients and optimizer states are sharded"),
        Setting(
            "offload",
            "keep parameters, gradients and optimizer states in host memory; states: the "
            "optimizer's moments alone, and the GPU updates, bit by bit as without",
            kinds.OFFLOAD,
            labels={True: "Offload", "states": "Offload-states"},
        ),
        Setting(
            "lora",
            "train LoRA adapters of this rank; the model is frozen, in bf16",
            kinds.COUNT,
            metavar="RANK",
            example=32,
            labels={None: ""},
            other_label="LoRA-{}",
        ),
        Setting(
            "lora_alpha",
            "adapters are multiplied by this over their rank; default: twice the rank",
            kinds.NUMBER,
            metavar="ALPHA",
            example=32,
            labels={None: ""},
            other_label="alpha-{:g}",
        ),
        Setting(
            "lora_targets",
            "linear layers with an adapter: all-linear, or names with commas between them",
            kinds.NAMES,
            labels={"all-linear": ""},
            other_label="on-{}",
        ),
        Setting(
            "lora_base",
            "what LoRA's frozen model is in: bf16, or its linear layers in nf4, 4 bits a number, "
            "which is QLoRA, by bitsandbytes, and lossy",
            labels={"bf16": "", "nf4": "NF4"},
        ),
        Setting(
            "optimizer",
            "adamw: 16 bytes of states a parameter; adamw-8bit: 10, moments of 8 bits; adamw-bf16: "
            "12, moments in bfloat16; the last two are torchao's, and lossy: moments are rounded",
            labels={"adamw": ""},
            other_label="{}",
        ),
        Setting(
            "parameters",
            "float32, or bf16 with adamw-8bit and adamw-bf16 (6 and 8 bytes of states a parameter) "
            "and --micro-batches 1; lossy: each update is rounded at random",
            labels={"float32": "", "bf16": "bf16-parameters"},
        ),
        Setting(
            "objective",
            "what is minimised, as the mean over all trained tokens of a step (TRL's dapo, verl's "
            "token-mean)",
        ),
        Setting("critic", "ppo: train a model of token values along", kinds.SWITCH),
        Setting(
            "entropy",
            "entropy in the loss of grpo and ppo: none, full, or chunked (recomputed)",
            labels={"chunked": "entropy-saving"},
        ),
        Setting(
            "checkpoint", "sharded: write model and optimizer after the last step", commands=_RUN
        ),
        Setting("save_hf", "when Hugging Face weights are written", commands=_RUN),
        Setting(
            "lora_merged",
            "what is saved is the model with its adapters in it, and not the adapters",
            kinds.SWITCH,
            commands=_TRAINED,
        ),
        Setting(
            "rope",
            "auto: YaRN past the native length, unless the model scales itself; yarn: all the same",
        ),
        Setting("sequences_per_micro_batch", "sequences packed into one micro-batch", kinds.COUNT),
        Setting(
            "token_budget",
            "tokens of a micro-batch for each GPU: packs as many sequences as they hold",
            kinds.TOKENS,
            commands=_PREDICT,
            in_base_units="token_budget_tokens",
        ),
        Setting(
            "timeout",
            "longest time for one trial; default: 40m, or its share of the budget",
            kinds.TIME,
            commands=_RUN,
            in_base_units="timeout_s",
        ),
        Setting(
            "steps", "optimizer steps of a trial, 2 or more", kinds.COUNT, commands=_RUN, example=2
        ),
        Setting(
            "micro_batches",
            "micro-batches of a step; 1: gradients are made in its backward pass, and take no "
            "memory before",
            kinds.COUNT,
            commands=_STEP,
            in_base_units="accumulates",
            typed={True: 2, False: 1},
            labels={False: "one-micro-batch"},
        ),
        Setting(
            "prompt_tokens",
            "first tokens of a sequence that are its prompt, and not trained, half of it at the "
            "most: the full loss makes no logits of them; default: 0, or a `--study`'s own",
            kinds.COUNT,
            commands=_STEP,
            example=2048,
        ),
        Setting(
            "data",
            "module:function that yields token batches: code of yours, which is run; default: "
            "synthetic ones",
            kinds.FUNCTION,
            commands=_RUN,
        ),
        Setting(
            "device", "what to train on; default: cuda where there is a GPU", commands=_TRAINED
        ),
        Setting(
            "runner",
            "where trials run: local, on this machine; ray, on the nodes of a running Ray cluster; "
            "default: local, and ray with --address",
            commands=_RUN,
        ),
        Setting(
            "address",
            "the Ray cluster to join, from one of its machines; default: RAY_ADDRESS, or the one "
            "that runs here",
            kinds.ADDRESS,
            commands=_RUN,
        ),
        Setting("log_dir", "directory of logs and studies", kinds.DIRECTORY, commands=_RUN),
        Setting(
            "checkpoint_dir",
            "directory below which trials save what they save; default: under the log directory",
            kinds.DIRECTORY,
            commands=_RUN,
            example="./checkpoints",
        ),
        Setting(
            "memory_profiler",
            "steps whose memory is recorded, from 0: a snapshot of each rank beside the log, for "
            "`highwater profile PATH`; a file may name profile_steps, max_entries and ranks",
            kinds.STEPS,
            commands=_TRAINED,
        ),
        Setting(
            "tensorboard",
            "also write the statistics of each step for TensorBoard, beside the log",
            kinds.SWITCH,
            commands=_TRAINED,
        ),
        Setting(
            "logit_range",
            "smallest and largest logit among the statistics, and each token's on average: one "
            "more pass over the logits",
            kinds.SWITCH,
            commands=_TRAINED,
        ),
        Setting(
            "allow_busy",
            "also start on GPUs that somebody else uses",
            kinds.SWITCH,
            commands=_TRAINED,
        ),
        Setting(
            "dry_run", "answer from a memory law; nothing is trained", kinds.SWITCH, commands=_RUN
        ),
        Setting(
            "attention_depth",
            "memory-only trial: attention over whole documents in the last N layers alone, on "
            "short pieces elsewhere",
            kinds.COUNT,
            commands=_TRY,
        ),
    ),
    "lengths": (
        Setting(
            "start_length",
            "shortest length to try, in tokens",
            kinds.LENGTH,
            commands=_LENGTHS,
            in_base_units="start_tokens",
        ),
        Setting(
            "resolution",
            "step between lengths; default: 4096 up to the native length, then a quarter of it",
            kinds.LENGTH,
            commands=_LENGTHS,
            in_base_units="resolution_tokens",
        ),
        Setting(
            "max_length",
            "longest length to try; default: 1m tokens, on the CPU 8k",
            kinds.LENGTH,
            commands=_LENGTHS,
            in_base_units="max_tokens",
            example="256k",
        ),
    ),
    "search": (
        Setting("method", "bisect, or linear: the published upward scan", commands=_FIND),
        Setting(
            "proof",
            "memory: a memory-only trial proves what fits where a full one would exceed the "
            "timeout; full: no trial but in full; default: memory on GPUs, and full where only "
            "--timeout is named",
            commands=_FIND,
        ),
        Setting(
            "budget",
            "longest time for the search, which the same command goes on with; default: 15m for "
            "each layout, and no end where --proof or --timeout is named",
            kinds.TIME,
            commands=_FIND,
            in_base_units="budget_s",
            example="2h",
        ),
        Setting(
            "prediction",
            "which length is tried first: by formula, by trace, or by a file of `highwater predict "
            "--json`",
            kinds.PREDICTION,
            commands=_FIND,
        ),
        Setting(
            "confirm",
            "times that both trials of the edge are repeated",
            kinds.COUNT,
            commands=_FIND,
            metavar="K",
            example=2,
        ),
        Setting(
            "headroom",
            "headroom that a length must leave to count, for example 2GiB",
            kinds.SIZE,
            commands=("find", "predict", "recommend", "emit"),
            in_base_units="margin_bytes",
            example="2GiB",
        ),
        Setting(
            "study",
            "file of the study; default: one for each question, under the log directory",
            kinds.FILE,
            commands=_FIND,
        ),
        Setting(
            "no_diagnose",
            "do not repeat the first out of memory, after the answer, with its memory recorded",
            kinds.SWITCH,
            commands=_FIND,
        ),
        Setting(
            "retry_crashed",
            "launch again what only crashed when the study was last searched",
            kinds.SWITCH,
            commands=_FIND,
        ),
    ),
    "machines": (
        Setting(
            "max_concurrent_trials",
            "trials that run at a time; default: as many as the GPUs hold, and one on the CPU",
            kinds.COUNT,
            commands=_FIND,
            metavar="N",
            example=1,
        ),
        Setting(
            "nodes",
            "machines that each trial runs on, or a training, with a copy of the states each",
            kinds.COUNT,
            commands=_ACROSS,
            metavar="N",
            example=2,
        ),
        Setting(
            "launcher",
            "command that starts one process on each of the machines, `srun` for example; it is "
            "split into words, and no shell sees it",
            kinds.COMMAND,
            commands=_ACROSS,
            metavar="COMMAND",
            example="srun --nodes 2 --ntasks-per-node 1 --kill-on-bad-exit",
        ),
        Setting(
            "rendezvous",
            "file through which the ranks of several machines meet, on a file system that all of "
            "them see, in a folder that is yours alone, which is made; default: the port that the "
            "launcher names in MASTER_ADDR",
            kinds.FILE,
            commands=_ACROSS,
            example="./logs/rendezvous-1/ranks",
        ),
    ),
    "optimizer": (
        _number("learning_rate", "RATE", "AdamW's learning rate"),
        _number("adam_beta1", "BETA", "AdamW's beta of the gradients' running mean"),
        _number("adam_beta2", "BETA", "AdamW's beta of the squares' running mean"),
        _number("adam_epsilon", "EPSILON", "AdamW's epsilon"),
        _number("weight_decay", "RATE", "AdamW's weight decay; norms and biases have none"),
        _number("max_grad_norm", "NORM", "norm that gradients are clipped to; 0: no clipping"),
    ),
    "objective": (
        _number(
            "clip_ratio_low",
            "SHARE",
            "grpo, ppo: how far below 1 a ratio of probabilities counts (TRL's epsilon)",
        ),
        _number(
            "clip_ratio_high",
            "SHARE",
            "grpo, ppo: how far above 1 a ratio of probabilities counts (TRL's epsilon_high)",
        ),
        _number(
            "dual_clip",
            "RATIO",
            "grpo, ppo: largest ratio of a token with a negative advantage (verl's clip_ratio_c, "
            "TRL's delta); 0: none",
        ),
        Setting(
            "kl_estimator",
            "grpo: estimator of the divergence from the reference (k3: verl's low_var_kl, and "
            "TRL's)",
            commands=_TRAINED,
        ),
        _number(
            "kl_coefficient",
            "WEIGHT",
            "grpo: weight of that divergence (verl's kl_loss_coef, TRL's beta)",
        ),
        _number(
            "entropy_coefficient", "WEIGHT", "grpo, ppo: weight of the entropy, where there is one"
        ),
        _number(
            "dpo_beta", "WEIGHT", "dpo: weight of a pair's margin over the reference's (TRL's beta)"
        ),
        _number(
            "value_clip",
            "CHANGE",
            "ppo with a critic: how far a value may move (verl's cliprange_value)",
        ),
        _number("value_coefficient", "WEIGHT", "ppo with a critic: weight of its squared error"),
        _number("discount", "SHARE", "ppo: discount of rewards (gamma)"),
        _number("gae_lambda", "SHARE", "ppo: lambda of the generalized advantages"),
    ),
}
"""The settings by topic, in the order in which a help lists them."""

DECLARED: Mapping[str, Setting] = {row.name: row for rows in TOPICS.values() for row in rows}
"""The settings, by name."""

_FIRST_IN_A_LABEL = ("allocator", "offload", "loss", "entropy")
"""Names of the settings that a label tells first, as in the published guides: "Env + Offload"."""
IN_A_LABEL: tuple[Setting, ...] = (
    *(DECLARED[name] for name in _FIRST_IN_A_LABEL),
    *(row for row in DECLARED.values() if row.labels and row.name not in _FIRST_IN_A_LABEL),
)
"""Settings that the label of a rung tells, in its order."""


def taken_by(command: CommandName, *, but_not: CommandName | None = None) -> tuple[Setting, ...]:
    """The settings that a command takes and another does not, in the order of its help."""
    return tuple(
        row for row in DECLARED.values() if command in row.commands and but_not not in row.commands
    )
