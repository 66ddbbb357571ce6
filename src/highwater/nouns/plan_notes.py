"""Notes of a plan: what a user should know before trials start, where nothing is refused."""

from pathlib import Path

import msgspec

from highwater.model.families import value_of
from highwater.model.model import Model
from highwater.model.model_config import has_own_code, read_config
from highwater.model.rope import YARN_IN_USE, yarn
from highwater.model.weight_files import SCORE, saved_tensors, weight_files
from highwater.nouns.layout import Device
from highwater.nouns.request import Request
from highwater.nouns.settings import Rope, Settings
from highwater.nouns.study import Question
from highwater.nouns.trainer import FOREIGN, ForeignTrainer
from highwater.units import MIB, format_bytes, format_tokens

ON_THE_CPU_NOTE = "no GPU is visible: trials run on the CPU, as with `--device cpu`"

SPARSE_NOTE = (
    "block-sparse attention changes the model: a token reads the blocks that a pattern keeps, not "
    "every earlier token"
)


def foreign_notes(request: Request, foreign: ForeignTrainer, device: Device) -> tuple[str, ...]:
    """Notes on trials of a foreign trainer, whose memory is sampled from outside its process."""
    traits = FOREIGN[foreign.trainer]
    title = foreign.title
    seen = "data segments" if device == "cpu" else "device memory used"
    notes = [f"{title} is started from outside: peaks are {seen}, sampled while it runs"]
    if device == "cuda" and not traits.has_run_on_gpus:
        notes.append(
            f"{title} has not been tried on GPUs yet, only on the CPU: `--trainer command` starts "
            "it by your own command"
        )
    if device == "cuda" and request.memory is not None:
        notes.append(
            "`--memory` bounds PyTorch's allocator in the trainer's processes: what takes memory "
            "past it is seen, not stopped"
        )
    if foreign.done_pattern == "":
        notes.append("`--done-pattern ''`: exit status 0 is taken for all steps done")
    return tuple(notes)


def lossy_notes(settings: Settings) -> tuple[str, ...]:
    """Notes on what optimizer and adapters round, compared with AdamW on a float32 model."""
    said: list[str] = []
    if not settings.optimizer_traits.is_exact:
        parameters = " and parameters" if settings.parameters == "bf16" else ""
        said.append(
            f"{settings.optimizer} is lossy: moments{parameters} are rounded at every update, "
            "which differs by that from AdamW's in float32"
        )
    if settings.lora_base != "bf16":
        said.append("nf4 is lossy: the frozen model's weights are rounded to 4 bits, once")
    return tuple(said)


def memory_notes(request: Request, device: Device, budget_bytes: int | None) -> tuple[str, ...]:
    """A note on the memory limit of each CPU process if the user named none."""
    if request.memory is not None or device != "cpu" or budget_bytes is None:
        return ()
    return (
        f"no `--memory` is named: each process may take {format_bytes(budget_bytes)}, its share of "
        f"half of the free memory, and 8 GiB at most; `--memory {budget_bytes // MIB}MiB` asks the "
        "same again",
    )


def offload_notes(settings: Settings, device: Device) -> tuple[str, ...]:
    """Notes on offload settings without an effect on this device; empty: all have one."""
    if settings.activations == "host" and device == "cpu":
        return ("on the CPU activations are in host memory in any case",)
    if not (settings.offloads_model or settings.offloads_states):
        return ()
    if device == "cpu":
        return ("on the CPU offload changes nothing: states are in host memory in any case",)
    if settings.strategy == "fsdp":
        return (
            "FSDP1 offloads parameters and optimizer states; a gradient, 4 bytes a parameter over "
            "all GPUs, stays on them until each backward pass ends; `--strategy fsdp2` offloads "
            "that too",
        )
    return ()


def placement_notes(request: Request, settings: Settings) -> tuple[str, ...]:
    """A note on where ``--activations auto`` puts the activations of a trial."""
    if request.activations != "auto":
        return ()
    return (f"`--activations auto` is `--activations {settings.activations}` here",)


def step_notes(
    model: Model, request: Request, settings: Settings, device: Device, longest_tokens: int | None
) -> tuple[str, ...]:
    """All notes that concern one step of our engine, shown before trials start."""
    return (
        *(*lossy_notes(settings), *offload_notes(settings, device), *own_code_notes(model)),
        *yarn_notes(model, longest_tokens, settings.rope),
        *weights_notes(model, settings, simulated=request.dry_run),
    )


def own_code_notes(model: Model) -> tuple[str, ...]:
    """A note that code which comes with the model (``auto_map``) is not run."""
    if not has_own_code(read_config(Path(model.directory, "config.json"))):
        return ()
    return (
        f"{model.name} brings code of its own (auto_map in its config.json), which is not run: "
        f"it is taken for the {model.shape.model_type} of transformers",
    )


def yarn_notes(model: Model, length_tokens: int | None, rope: Rope) -> tuple[str, ...]:
    """A warning if YaRN scales positions by a larger factor than published models do."""
    scaled = None if length_tokens is None else yarn(model, length_tokens=length_tokens, rope=rope)
    if scaled is None or scaled.factor <= YARN_IN_USE:
        return ()
    return (
        f"YaRN stretches the positions of {model.name} {scaled.factor:.4g} times: published models "
        f"go up to {YARN_IN_USE} times, so measure what the model learns of such lengths",
    )


def weights_notes(model: Model, settings: Settings, *, simulated: bool = False) -> tuple[str, ...]:
    """Notes on the weights that a trial starts from; on random ones none if it is simulated."""
    directory = Path(model.directory)
    notes: list[str] = []
    if model.text_of is not msgspec.UNSET:
        notes.append(
            f"the text model of {model.name} is trained, alone: its vision tower is not loaded, "
            f"and is saved as its files have it"
        )
    if not weight_files(directory):
        if simulated:
            return ()
        random = f"random weights: {model.name} has none here"
        if model.shape.experts == 1:
            return (f"{random}; memory and time are those of trained ones, the loss is not",)
        return (
            f"{random}, and random ones send the tokens to its {model.shape.experts} experts "
            "nearly evenly: time may differ with trained ones, memory does not (every token goes "
            "to as many experts, whichever they are)",
        )
    tensors = saved_tensors(directory)
    gives_numbers = settings.critic or settings.traits.gives_scalars
    if tensors and SCORE not in tensors and gives_numbers and not simulated:
        notes.append(
            f"random weights in the head that gives one number a token: the files of {model.name} "
            f"have no {SCORE}"
        )
    if not model.shape.tied_embeddings and value_of(
        read_config(directory / "config.json"), "tie_word_embeddings"
    ):
        notes.append(
            f"the head of {model.name} is trained apart from the embedding, though its config.json "
            "ties them: its files hold both, with different values, and transformers does the same"
        )
    return tuple(notes)


def prompt_notes(path: Path | str | None, question: Question) -> tuple[str, ...]:
    """A note that a study's sequences began with a prompt, of which the loss made no logits."""
    has_logits = any(cell.settings.holds_logits for cell in question.cells)
    is_synthetic = question.foreign is None and question.data is None
    if not (question.prompt_tokens and has_logits and is_synthetic):
        return ()
    return (
        f"sequences of {path} begin with a prompt of {format_tokens(question.prompt_tokens)} "
        "tokens, of which the full loss makes no logits: without `--study` every token is counted",
    )
