"""What a guide says besides its tables; ``code`` and **bold** are marked so."""

from collections.abc import Mapping

from highwater.model.rope import yarn_parameters
from highwater.nouns.environment import ENV_BEFORE_IN_WORDS, ENV_IN_WORDS

WORDS: Mapping[str, str] = {
    "vanilla": "nothing needs to be set.",
    "Env": f"set `export {ENV_IN_WORDS}` before any process starts; with Ray, before Ray starts; "
    f"{ENV_BEFORE_IN_WORDS}.",
    "Offload": "FSDP2 with CPU offload: parameters, gradients and optimizer states live in host "
    "memory, 16 to 20 bytes a "
    "parameter; predictions take it to be there: `highwater predict MODEL --gpus GPUS --offload` "
    "says how much it is.",
    "Offload-states": "`--offload states`: the optimizer's moments alone live in host memory, 8 "
    "bytes a parameter, and pass through the GPU as it updates; the numbers are those of training "
    "without.",
    "SP=N": "Ulysses sequence parallelism: N GPUs share each sequence. N divides the number of "
    "GPUs.",
    "ring=": "a ring: N GPUs, or groups of SP GPUs, share each sequence, passing keys and values "
    "on; for more GPUs than the heads let share one.",
    "copies": "HSDP: copies of what FSDP2 shards, for example one a node; each takes the states of "
    "fewer GPUs.",
    "chunked": "`--loss chunked`: the loss never holds more than a chunk of the logits.",
    "entropy-saving": "`--entropy chunked`: the entropy is computed in chunks and recomputed in "
    "the backward pass.",
    "no-recompute": "`--recompute none`: every activation is kept.",
    "attention-kept": "`--recompute all-but-attention`: what the attention returns is kept, all "
    "else is recomputed.",
    "one-micro-batch": "`--micro-batches 1`: a step has one micro-batch, whose backward pass makes "
    "the gradients: they take no memory before.",
    "mlp-tiles": "`--mlp-tiles N`: the MLP is computed in N tiles over the tokens.",
}
"""Words that a label is made of, explained."""
ALWAYS = frozenset(("vanilla", "Env", "Offload", "SP=N"))
"""Words that every guide explains; the others only where they occur."""

TITLE = "The longest context that trains, and the simplest settings for it"
LONG_CONTEXTS = (
    "Lengths past a model's native length need YaRN, whose factor is length / native length. In a "
    "Trinity-RFT configuration, with `MODEL_PATH`, `MAX_MODEL_LEN` and `FACTOR` in the environment:"
)
LONG_CONTEXTS_TRAINER = (
    "**The trainer needs YaRN in the model itself.** In Trinity-RFT 0.6.0 `model.rope_scaling` "
    "reaches the rollout alone: the trainer reads the model's own `config.json`. Write the same "
    "values there, as `rope_parameters` with the model's `rope_theta`, and the length as "
    "`max_position_embeddings`; `highwater recommend` prints the block."
)
GLANCE = (
    "The longest length known to fit with any of the settings that were tried, in tokens. `*`: "
    "past the native length, with YaRN. `≥`: no longer one is known not to fit. `memory-only`: "
    "memory holds it; the longest that was trained in full stands before it. Empty: not tried."
)
CAPACITIES = (
    "The longest length that each rung is known to fit, by number of GPUs and SP. `*`: past the "
    "native length, with YaRN. `-`: not even the shortest. `?`: unknown. `≥`: no longer one was "
    "tried. `<`: no shorter one was tried. Empty: not tried."
)
COMBINED = "Entries with `+`, such as `Env + SP=2`: all of it at once."
SAME_LABEL = (
    "Where settings of one label were tried with both FSDP1 and FSDP2, or with and without saving "
    "Hugging Face weights, the best of them counts; the capacities below show each."
)
BUDGETED = (
    "**with 79.15 GiB**, or another figure, after the name of a GPU: the trials there were to take "
    "no more than that of its memory, as if on a card with as much. The whole card holds more."
)
JOINED = "`51,200 – 81,920`: every length of the grid from the first to the second."
NOTHING = "`-`: nothing that was tried fits."
UNKNOWN = "`?`: nothing is known to fit, and not everything was tried."
PERHAPS_SIMPLER = "`Env ?`: this fits; whether something simpler does, nobody knows."
ONLY_TRIED = (
    "**Tried here, and nothing simpler**: the entries of that table are the simplest of "
    "these alone."
)
ONE_SEQUENCE = (
    "These tables hold for one sequence a micro-batch, a token budget of `ceil(max_model_len / "
    "SP)` per GPU, as `highwater recommend` answers for this engine. Two sequences, the default of "
    "other trainers, take more memory: `--sequences-per-micro-batch 2`."
)
MEMORY_ONLY = (
    "`(memory-only)`: memory holds it; the whole step takes too long to be tried, and "
    "nothing was trained."
)

TRAINERS_GPUS = (
    "GPU counts are those of the trainer alone. GPUs that generate (rollout, inference engines) "
    "come on top: a trainer on 4 GPUs beside a rollout on 4 needs 8."
)
ONE_GPU = (
    "**Warning: a trainer on one GPU.** It holds all parameters, gradients and optimizer states "
    "itself, and shares no sequence: there is no SP. Take two GPUs or more for long sequences, and "
    "for models whose states fill most of the card."
)

_BATCHES = "trainer.trainer_config.actor_rollout_ref"
BUDGET = (
    "With dynamic batches (`trainer.use_dynamic_bsz: true`, the default of Trinity-RFT) two "
    "numbers decide how many tokens a GPU "
    "gets at once, and with the model they decide the peak of its memory:"
)
BUDGETS = (
    f"`{_BATCHES}.actor.ppo_max_token_len_per_gpu` for the update,",
    f"`{_BATCHES}.ref.log_prob_max_token_len_per_gpu` for the log-probabilities of the reference.",
)
BUDGET_OF_BOTH = (
    "In the section of the trainer itself: `trainer.max_token_len_per_gpu`, which "
    "`highwater emit --for trinity` writes."
)
BUDGET_RULE = (
    "Left out, both are `ceil(2 * max_model_len / SP)`: a micro-batch holds two of the longest "
    "sequences. Less saves memory, down to `ceil(max_model_len / SP)`, which holds one; less than "
    "that holds no sequence of full length, and is refused. The longer the context, the more "
    "tokens on each GPU; a higher SP divides them."
)
PRACTICES = (
    "Begin with the simplest configuration that the table names for your length, not with the one "
    "that saves most.",
    "Past the native length use YaRN, with a factor of length / native length.",
    "When memory runs out, first `Env`, then a higher SP, and only then FSDP2 with CPU offload.",
    "SP has to be a common divisor of the number of GPUs and of the model's attention heads; a "
    "ring has no such limit.",
    "Take more GPUs rather than fill the last one: a full GPU fails on the first step that is a "
    "little larger.",
)

CHOICES = (
    ("model", "Model"),
    ("gpu", "Kind of GPU"),
    ("gpus", "How many GPUs"),
    ("basis", "Training and figures"),
)
WITHOUT_SCRIPT = (
    "A browser that runs scripts offers a choice of model, GPUs and length here. Without, the "
    "tables below say which settings fit, "
    "and `highwater recommend MODEL --gpus 4xA100-80GB --length 64k` answers for any length."
)
BEYOND = (
    "This page has no answer for a length as long as that. The command has, and says what would "
    "do where nothing fits."
)
SPEED = (
    "Tokens a second over all GPUs, at the longest length that fits and with the simplest "
    "settings that reach it; a step's time beside it. **predicted**: from what each kind of GPU "
    "does in a second, nothing was run."
)
ASK_AGAIN = (
    "This command gives the same answer, from the same version; with another length it "
    "answers between those offered here."
)
AS_JSON = (
    "As `highwater recommend --json` has it, but for the list of candidates; the tables "
    "above show those."
)


def long_context(model_name: str, native_length_tokens: int) -> str:
    """The model's part of a Trinity-RFT configuration past the native length."""
    factor = f"${{oc.decode:${{oc.env:FACTOR}}}}  # MAX_MODEL_LEN / {native_length_tokens}"
    block = yarn_parameters(factor, native_length_tokens=native_length_tokens)
    scaling = "".join(f"    {name}: {value}\n" for name, value in block.items())
    return f"""\
model:
  model_path: ${{oc.env:MODEL_PATH,{model_name}}}
  max_prompt_tokens: 2048
  max_model_len: ${{oc.env:MAX_MODEL_LEN,4096}}
  rope_scaling:
{scaling}"""
