"""Every setting that a user can name, declared once: what its value is, which commands take it, its
help, its label.

The grammar of the command line, the schema of ``--config``, the refusals and the labels of rungs
read these rows. A new setting is a row, its fields (of ``Request``, and of ``Settings`` or
``Hyperparameters`` where a rung or an optimizer has it), and whoever acts on it.
"""

from collections.abc import Mapping
from typing import Literal

from highwater.nouns.declaration import (
    ADDRESS,
    CHOICE,
    COMMAND,
    COUNT,
    COUNTS,
    DIRECTORY,
    FILE,
    FUNCTION,
    LENGTH,
    MODEL,
    NAMES,
    NUMBER,
    OFFLOAD,
    PATTERN,
    PREDICTION,
    SHARE,
    SIZE,
    STEPS,
    SWITCH,
    TIME,
    TOKENS,
    CommandName,
    Setting,
)

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
_ALL: tuple[CommandName, ...] = ("find", "try", "predict", "recommend", "emit", "train")
_STEP: tuple[CommandName, ...] = ("find", "try", "predict", "recommend", "emit")
"""All that are about a trial's step; a training has rows of its own."""


def _number(name: str, metavar: str, help_: str) -> Setting:
    """A hyperparameter."""
    return Setting(name, NUMBER, _TRAINED, help_, metavar=metavar)


TOPICS: Mapping[Topic, tuple[Setting, ...]] = {
    "model": (
        Setting(
            "model",
            MODEL,
            _ALL,
            "directory of a Hugging Face model, its id on the Hub such as Qwen/Qwen2.5-7B, or a "
            "catalog name such as Qwen3-0.6B",
        ),
    ),
    "trial": (
        Setting(
            "trainer",
            CHOICE,
            _RUN,
            "what is tried: this package's engine, or a trainer that is started from outside",
            any_other="command",
        ),
        Setting(
            "command",
            COMMAND,
            _RUN,
            "--trainer command: what starts it, with {length} and other values of the trial in its "
            "words; no shell runs it. --trainer accelerate: the script that it launches, likewise. "
            "any other trainer: the program, where it is not its own name in PATH",
        ),
        Setting(
            "trainer_config",
            FILE,
            _RUN,
            "configuration of the trainer, your own, whose other fields stay",
            example="base.yaml",
        ),
        Setting(
            "done_pattern",
            PATTERN,
            _RUN,
            "what in the trainer's log shows that the steps are done, with a group `step` for "
            "their number; '': exit status 0 does; default: the usual progress lines",
        ),
        Setting(
            "gpus",
            COUNTS,
            _TRAINED,
            "GPU counts to search; default: the powers of two up to those present",
            helps={
                "train": "how many GPUs train; default: all that are here; on the CPU processes"
            },
        ),
        Setting(
            "ulysses",
            COUNTS,
            _ALL,
            "Ulysses degrees (SP): GPUs that share one sequence",
            defaults=dict.fromkeys(
                ("predict", "recommend", "emit"), "every degree that divides GPUs and heads"
            ),
        ),
        Setting(
            "ring",
            COUNTS,
            _ALL,
            "ring degrees: GPUs, or groups of --ulysses GPUs, that share one sequence by passing "
            "keys and values on",
        ),
        Setting(
            "copies",
            COUNTS,
            _ALL,
            "copies of what FSDP2 shards (HSDP): GPUs / copies shards, one copy a node for example",
        ),
        Setting(
            "memory",
            SIZE,
            _TRAINED,
            "bound on the memory of each GPU, for example 79.15GiB; on the CPU of each process",
            in_base_units="memory_bytes",
        ),
        Setting(
            "loss",
            CHOICE,
            _ALL,
            "keep only rungs with this loss; default: the whole ladder",
            helps={
                "train": "logits of all tokens at once, or of a chunk at a time; default: full, or "
                "what is recommended where no setting is named"
            },
            labels={"chunked": "chunked"},
        ),
        Setting(
            "allocator",
            CHOICE,
            _ALL,
            "keep only rungs with this allocator; default: the whole ladder",
            helps={
                "train": "PyTorch's allocator of GPU memory; default: native, or what is "
                "recommended where no setting is named"
            },
            labels={"expandable": "Env"},
        ),
        Setting(
            "recompute",
            CHOICE,
            _ALL,
            "activations recomputed in the backward pass",
            labels={"layer": "", "none": "no-recompute", "all-but-attention": "attention-kept"},
            other_label="recompute-{}",
        ),
        Setting(
            "mlp_tiles",
            COUNT,
            _ALL,
            "tiles over the tokens that an MLP goes in; default: as recompute has them for free",
            example=8,
            labels={None: ""},
            other_label="mlp-tiles-{}",
        ),
        Setting(
            "attention",
            CHOICE,
            _ALL,
            "dense, or block_sparse: each block of tokens reads the blocks that a pattern keeps, "
            "which changes the model",
            labels={"dense": "", "block_sparse": "block-sparse"},
        ),
        Setting(
            "pattern_type",
            CHOICE,
            _ALL,
            "block_sparse: which blocks are kept",
            labels={"dilated_sparse": ""},
            other_label="{}",
        ),
        Setting(
            "sparsity_ratio",
            SHARE,
            _ALL,
            "block_sparse: share of earlier blocks that is KEPT, or adaptive (5 % to 64k tokens, "
            "2 % to 128k, 1 % above); default: 0.1, or what the window gives",
            labels={None: ""},
            other_label="kept-{}",
        ),
        Setting(
            "block_size",
            COUNT,
            _ALL,
            "block_sparse: tokens of a block",
            example=128,
            labels={128: ""},
            other_label="block-{}",
        ),
        Setting(
            "local_window_size",
            COUNT,
            _ALL,
            "block_sparse: tokens that local_window and global_local read, back from each",
            example=512,
            labels={512: ""},
            other_label="window-{}",
        ),
        Setting(
            "global_tokens",
            COUNT,
            _ALL,
            "block_sparse: first tokens of a document, which global_local reads from everywhere",
            example=64,
            labels={64: ""},
            other_label="global-{}",
        ),
        Setting(
            "strategy", CHOICE, _ALL, "how parameters, gradients and optimizer states are sharded"
        ),
        Setting(
            "offload",
            OFFLOAD,
            _ALL,
            "keep parameters, gradients and optimizer states in host memory; states: the "
            "optimizer's moments alone, and the GPU updates, bit by bit as without",
            labels={True: "Offload", "states": "Offload-states"},
        ),
        Setting(
            "lora",
            COUNT,
            _ALL,
            "train LoRA adapters of this rank; the model is frozen, in bf16",
            metavar="RANK",
            example=32,
            labels={None: ""},
            other_label="LoRA-{}",
        ),
        Setting(
            "lora_alpha",
            NUMBER,
            _ALL,
            "adapters are multiplied by this over their rank; default: twice the rank",
            metavar="ALPHA",
            example=32,
            labels={None: ""},
            other_label="alpha-{:g}",
        ),
        Setting(
            "lora_targets",
            NAMES,
            _ALL,
            "linear layers with an adapter: all-linear, or names with commas between them",
            labels={"all-linear": ""},
            other_label="on-{}",
        ),
        Setting(
            "lora_base",
            CHOICE,
            _ALL,
            "what LoRA's frozen model is in: bf16, or its linear layers in nf4, 4 bits a number, "
            "which is QLoRA, by bitsandbytes, and lossy",
            labels={"bf16": "", "nf4": "NF4"},
        ),
        Setting(
            "optimizer",
            CHOICE,
            _ALL,
            "adamw: 16 bytes of states a parameter; adamw-8bit: 10, moments of 8 bits; adamw-bf16: "
            "12, moments in bfloat16; the last two are torchao's, and lossy: moments are rounded",
            labels={"adamw": ""},
            other_label="{}",
        ),
        Setting(
            "parameters",
            CHOICE,
            _ALL,
            "float32, or bf16 with adamw-8bit and adamw-bf16 (6 and 8 bytes of states a parameter) "
            "and --micro-batches 1; lossy: each update is rounded at random",
            labels={"float32": "", "bf16": "bf16-parameters"},
        ),
        Setting(
            "objective",
            CHOICE,
            _ALL,
            "what is minimised, as the mean over all trained tokens of a step (TRL's dapo, verl's "
            "token-mean)",
        ),
        Setting("critic", SWITCH, _ALL, "ppo: train a model of token values along"),
        Setting(
            "entropy",
            CHOICE,
            _ALL,
            "entropy in the loss of grpo and ppo: none, full, or chunked (recomputed)",
            labels={"chunked": "entropy-saving"},
        ),
        Setting(
            "checkpoint", CHOICE, _RUN, "sharded: write model and optimizer after the last step"
        ),
        Setting("save_hf", CHOICE, _RUN, "when Hugging Face weights are written"),
        Setting(
            "lora_merged",
            SWITCH,
            _TRAINED,
            "what is saved is the model with its adapters in it, and not the adapters",
        ),
        Setting(
            "rope",
            CHOICE,
            _ALL,
            "auto: YaRN past the native length, unless the model scales itself; yarn: all the same",
        ),
        Setting(
            "sequences_per_micro_batch",
            COUNT,
            _ALL,
            "sequences packed into one micro-batch",
        ),
        Setting(
            "token_budget",
            TOKENS,
            _PREDICT,
            "tokens of a micro-batch for each GPU: packs as many sequences as they hold",
            in_base_units="token_budget_tokens",
        ),
        Setting(
            "timeout",
            TIME,
            _RUN,
            "longest time for one trial; default: 40m, or its share of the budget",
            in_base_units="timeout_s",
        ),
        Setting("steps", COUNT, _RUN, "optimizer steps of a trial, 2 or more", example=2),
        Setting(
            "micro_batches",
            COUNT,
            _STEP,
            "micro-batches of a step; 1: gradients are made in its backward pass, and take no "
            "memory before",
            in_base_units="accumulates",
            typed={True: 2, False: 1},
            labels={False: "one-micro-batch"},
        ),
        Setting(
            "prompt_tokens",
            COUNT,
            _STEP,
            "first tokens of a sequence that are its prompt, and not trained, half of it at the "
            "most: the full loss makes no logits of them; default: 0, or a `--study`'s own",
            example=2048,
        ),
        Setting(
            "data",
            FUNCTION,
            _RUN,
            "module:function that yields token batches: code of yours, which is run; default: "
            "synthetic ones",
        ),
        Setting("device", CHOICE, _TRAINED, "what to train on; default: cuda where there is a GPU"),
        Setting(
            "runner",
            CHOICE,
            _RUN,
            "where trials run: local, on this machine; ray, on the nodes of a running Ray cluster; "
            "default: local, and ray with --address",
        ),
        Setting(
            "address",
            ADDRESS,
            _RUN,
            "the Ray cluster to join, from one of its machines; default: RAY_ADDRESS, or the one "
            "that runs here",
        ),
        Setting("log_dir", DIRECTORY, _RUN, "directory of logs and studies"),
        Setting(
            "checkpoint_dir",
            DIRECTORY,
            _RUN,
            "directory below which trials save what they save; default: under the log directory",
            example="./checkpoints",
        ),
        Setting(
            "memory_profiler",
            STEPS,
            _TRAINED,
            "steps whose memory is recorded, from 0: a snapshot of each rank beside the log, for "
            "`highwater profile PATH`; a file may name profile_steps, max_entries and ranks",
        ),
        Setting(
            "tensorboard",
            SWITCH,
            _TRAINED,
            "also write the statistics of each step for TensorBoard, beside the log",
        ),
        Setting(
            "logit_range",
            SWITCH,
            _TRAINED,
            "smallest and largest logit among the statistics, and each token's on average: one "
            "more pass over the logits",
        ),
        Setting("allow_busy", SWITCH, _TRAINED, "also start on GPUs that somebody else uses"),
        Setting("dry_run", SWITCH, _RUN, "answer from a memory law; nothing is trained"),
        Setting(
            "attention_depth",
            COUNT,
            _TRY,
            "memory-only trial: attention over whole documents in the last N layers alone, on "
            "short pieces elsewhere",
        ),
    ),
    "lengths": (
        Setting(
            "start_length",
            LENGTH,
            _LENGTHS,
            "shortest length to try, in tokens",
            in_base_units="start_tokens",
        ),
        Setting(
            "resolution",
            LENGTH,
            _LENGTHS,
            "step between lengths; default: 4096 up to the native length, then a quarter of it",
            in_base_units="resolution_tokens",
        ),
        Setting(
            "max_length",
            LENGTH,
            _LENGTHS,
            "longest length to try; default: 1m tokens, on the CPU 8k",
            in_base_units="max_tokens",
            example="256k",
        ),
    ),
    "search": (
        Setting("method", CHOICE, _FIND, "bisect, or linear: the published upward scan"),
        Setting(
            "proof",
            CHOICE,
            _FIND,
            "memory: a memory-only trial proves what fits where a full one would exceed the "
            "timeout; full: no trial but in full; default: memory on GPUs, and full where only "
            "--timeout is named",
        ),
        Setting(
            "budget",
            TIME,
            _FIND,
            "longest time for the search, which the same command goes on with; default: 15m for "
            "each layout, and no end where --proof or --timeout is named",
            in_base_units="budget_s",
            example="2h",
        ),
        Setting(
            "prediction",
            PREDICTION,
            _FIND,
            "which length is tried first: by formula, by trace, or by a file of `highwater predict "
            "--json`",
        ),
        Setting(
            "confirm",
            COUNT,
            _FIND,
            "times that both trials of the edge are repeated",
            metavar="K",
            example=2,
        ),
        Setting(
            "headroom",
            SIZE,
            ("find", "predict", "recommend", "emit"),
            "headroom that a length must leave to count, for example 2GiB",
            in_base_units="margin_bytes",
            example="2GiB",
        ),
        Setting(
            "study",
            FILE,
            _FIND,
            "file of the study; default: one for each question, under the log directory",
        ),
        Setting(
            "no_diagnose",
            SWITCH,
            _FIND,
            "do not repeat the first out of memory, after the answer, with its memory recorded",
        ),
        Setting(
            "retry_crashed",
            SWITCH,
            _FIND,
            "launch again what only crashed when the study was last searched",
        ),
    ),
    "machines": (
        Setting(
            "max_concurrent_trials",
            COUNT,
            _FIND,
            "trials that run at a time; default: as many as the GPUs hold, and one on the CPU",
            metavar="N",
            example=1,
        ),
        Setting(
            "nodes",
            COUNT,
            _ACROSS,
            "machines that each trial runs on, or a training, with a copy of the states each",
            metavar="N",
            example=2,
        ),
        Setting(
            "launcher",
            COMMAND,
            _ACROSS,
            "command that starts one process on each of the machines, `srun` for example; it is "
            "split into words, and no shell sees it",
            metavar="COMMAND",
            example="srun --nodes 2 --ntasks-per-node 1 --kill-on-bad-exit",
        ),
        Setting(
            "rendezvous",
            FILE,
            _ACROSS,
            "file through which the ranks of several machines meet, on a file system that all of "
            "them see, in a folder that is yours alone, which is made; default: the port that the "
            "launcher names in MASTER_ADDR",
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
            CHOICE,
            _TRAINED,
            "grpo: estimator of the divergence from the reference (k3: verl's low_var_kl, and "
            "TRL's)",
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
            "dpo_beta",
            "WEIGHT",
            "dpo: weight of a pair's margin over the reference's (TRL's beta)",
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
