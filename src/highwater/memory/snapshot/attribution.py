"""Attribution: what an allocation was for, by the stack that asked for it.

Frames are asked from the innermost outwards, and the first that tells decides: a frame of FSDP's
``forward`` is around every layer, and says nothing about what the layer allocates. Of this engine
the rules are exact; of any other program they are PyTorch's own files, then names that libraries
have in common. Where no frame tells, the phase does that the program had said it was in; else it is
``unattributed``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from highwater.memory.snapshot.snapshot import Frame, Snapshot

Category = Literal[
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "logits",
    "communication",
    "workspaces",
    "unattributed",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""The categories, from what stays longest to what nobody knows."""


class _Rule(NamedTuple):
    category: Category
    file: str
    """Regular expression that is searched in a frame's path."""
    name: str = ""
    """Regular expression that is searched in its function's name."""


_OURS = (
    _Rule("logits", r"highwater/(models/loss|kernels/rows\w*)\.py$"),
    _Rule("gradients", r"highwater/train/optimizers\.py$", r"^make_optimizer$"),
    _Rule("gradients", r"highwater/(models/fused/weight_gradient|parallel/offload)\.py$"),
    _Rule("gradients", r"highwater/", r"^(backward|clip|add_up|_sum_to_shard)$"),
    _Rule(
        "communication", r"highwater/(parallel/(collectives|mesh)|attention/(ulysses|ring))\.py$"
    ),
    _Rule(
        "parameters",
        r"highwater/(models/(build|fill|weights|pretrained|random_weights)"
        r"|parallel/fsdp\d|train/assemble)\.py$",
        r"^(?!forward$)",
    ),
    _Rule("activations", r"highwater/(models|activations|attention|kernels)/"),
    _Rule("activations", r"highwater/train/(objectives|experience|data)\.py$"),
)
"""This engine's files."""
_PYTORCH = (
    _Rule("workspaces", "", r"[wW]orkspace|getCurrentCUDABlas"),
    _Rule("workspaces", r"/triton/(runtime|testing)"),
    _Rule("optimizer_states", r"torch/optim/", r"^(?!zero_grad$)"),
    _Rule("gradients", r"torch/nn/utils/clip_grad"),
    _Rule("gradients", r"torch/distributed/", r"foreach_reduce$|reduce_grad|_post_backward|accum"),
    _Rule("gradients", "", r"AccumulateGrad|autograd::Engine|Backward\d*::apply"),
    _Rule(
        "parameters",
        r"torch/distributed/",
        r"^(_init_\w*param\w*|_init_from_\w+|flatten_\w+|shard|reset_sharded_param|fully_shard)$",
    ),
    _Rule("communication", r"torch/distributed/(distributed_c10d|_functional_collectives)\.py$"),
    _Rule("communication", r"torch/(distributed/nn/functional|cuda/nccl|cuda/comm)\.py$"),
    _Rule(
        "communication",
        r"torch/distributed/",
        r"all_gather|allgather|unshard|reduce_scatter|all_reduce|broadcast|redistribute|^allocate$"
        r"|_use_unsharded|alloc_storage|_all_to_all|send|recv",
    ),
    _Rule("communication", "", r"ProcessGroupNCCL|c10d::"),
    _Rule("logits", r"torch/nn/functional\.py$", r"cross_entropy|nll_loss|log_softmax"),
    _Rule("logits", r"torch/nn/modules/loss\.py$"),
    _Rule("parameters", r"torch/nn/init\.py$|torch/nn/parameter\.py$"),
    _Rule(
        "parameters",
        r"torch/nn/modules/",
        r"^(__init__|reset_parameters|_load_from_state_dict|to_empty|_apply|convert)$",
    ),
    _Rule("activations", r"torch/nn/modules/", r"^forward$"),
    _Rule("activations", r"torch/(nn/functional|utils/checkpoint)\.py$"),
)
"""PyTorch's own files and functions; without a file, functions of C++."""
_LIBRARIES = (
    _Rule("logits", r"cross_entropy|transformers/loss/|liger_kernel/.*(loss|grpo|dpo)"),
    _Rule("logits", "", r"cross_entropy|log_softmax|selective_log|_logps$|logprobs|entropy_from"),
    _Rule(
        "optimizer_states",
        r"apex/optimizers|transformer_engine/pytorch/optimizers|megatron/core/optimizer"
        r"|bitsandbytes/optim|deepspeed/ops/(adam|lamb|lion)|deepspeed/runtime/(zero/stage|bf16_opt"
        r"|fp16)",
    ),
    _Rule("gradients", r"param_and_grad_buffer|grad_accum|clip_grads"),
    _Rule("gradients", r"megatron/|deepspeed/|transformer_engine/", r"backward|grad"),
    _Rule("communication", r"deepspeed/comm|tensor_parallel/mappings|p2p_communication"),
    _Rule("communication", r"\.py$", r"^_?(all_gather|all_reduce|reduce_scatter|all_to_all)"),
    _Rule("parameters", r"deepspeed/runtime/zero/partition_parameters"),
    _Rule("activations", r"flash_attn|flashinfer|xformers|/fla/"),
    _Rule("gradients", r"\.py$", r"^_?backward$"),
    _Rule(
        "parameters",
        r"\.py$",
        r"^(_initialize_\w*weight\w*|_?load_state_dict\w*|_?load_pretrained\w*|from_pretrained"
        r"|_load_parameter_into_model|set_module_tensor_to_device|materialize\w*|init_weights"
        r"|_init_weights)$",
    ),
    _Rule("parameters", r"(modeling_\w+|megatron/core/\S+)\.py$", r"^__init__$"),
    _Rule("activations", r"\.py$", r"^_?forward(_\w+)?$"),
)
"""Libraries that are trained with, and names that they share."""
_COMPILED: list[tuple[Category, re.Pattern[str], re.Pattern[str]]] = [
    (rule.category, re.compile(rule.file), re.compile(rule.name))
    for rule in (*_OURS, *_PYTORCH, *_LIBRARIES)
]
_BY_PHASE: Mapping[str, Category] = {
    "build": "parameters",
    "forward": "activations",
    "experience": "activations",
    "backward": "gradients",
    "optimizer": "optimizer_states",
}
"""What an allocation is for of which the phase alone is known."""
_PHASE = "phase"
"""The path of the frame that names the phase in a timeline (memory/trace/timeline.py)."""
_NO_MODULE = "no module"
_LAYER = re.compile(r"\.\d+(?=\.|$)")
_MODELING = re.compile(r"/modeling_\w+\.py$")
_LINEAR = re.compile(r"torch/nn/modules/linear\.py$")
_PYTORCHS = re.compile(r"(^|/)torch/|\.(cpp|cc|c|h|cu|cuh)$|^\?*$|^<")
"""Paths of PyTorch, of C++ and of what has none."""


class Attribution:
    """The category and the place of each stack of a snapshot; each frame is looked at once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._of_frame: dict[int, Category | None] = {}
        self._of_stack: dict[tuple[int, str], Category] = {}

    def category(self, stack: int, phase: str) -> Category:
        """What was allocated for, by its stack, else by the phase that was named."""
        known = self._of_stack.get((stack, phase))
        if known is None:
            known = self._found(self._snapshot.stacks[stack], phase)
            self._of_stack[stack, phase] = known
        return known

    def place(self, stack: int) -> str:
        """The innermost line that is not PyTorch's own, ``models/loss.py:88 forward``; PyTorch's
        where there is none; empty without a stack.
        """
        indices = self._snapshot.stacks[stack]
        frames = [self._snapshot.frames[index] for index in indices]
        if not frames:
            return ""
        own = (frame for frame in frames if not _PYTORCHS.search(frame.file))
        return shown(frames[0] if is_traced(self._snapshot, stack) else next(own, frames[0]))

    def _found(self, stack: Sequence[int], phase: str) -> Category:
        frames = self._snapshot.frames
        if stack and frames[stack[-1]].file == _PHASE:
            return _traced(frames[stack[0]], frames[stack[-1]].name)
        if _is_head([frames[index] for index in stack]):
            return "logits"
        categories = map(self._category_of_frame, stack)
        for category in categories:
            if category is not None:
                return category
        return _BY_PHASE.get(phase.partition(" ")[0], "unattributed")

    def _category_of_frame(self, index: int) -> Category | None:
        if index not in self._of_frame:
            self._of_frame[index] = category_of(self._snapshot.frames[index])
        return self._of_frame[index]


def category_of(frame: Frame) -> Category | None:
    """What a line allocates; None where it does not tell."""
    path = frame.file.replace("\\", "/")
    for category, file, name in _COMPILED:
        if file.search(path) and name.search(frame.name):
            return category
    return None


def is_traced(snapshot: Snapshot, stack: int) -> bool:
    """Whether a stack is that of a traced allocation: an operator in a module, and a phase."""
    frames = snapshot.stacks[stack]
    return bool(frames) and snapshot.frames[frames[-1]].file == _PHASE


def shown(frame: Frame) -> str:
    """A frame on one line: the last two parts of its path, its line, its function; of what was
    traced the module, ``*`` for the number of a layer, and the operator.
    """
    if frame.file == _PHASE:
        return frame.name
    path = "/".join(frame.file.replace("\\", "/").split("/")[-2:])
    if not path.endswith(".py"):
        path = _LAYER.sub(".*", path)
    where = f"{path}:{frame.line}" if frame.line else path
    return f"{where} {frame.name}".strip(" ?") or "a frame without a name"


def _is_head(stack: Sequence[Frame]) -> bool:
    """Whether a linear layer was called by a model of transformers itself, not by one of its parts:
    its output head. In such a stack the modelling file's ``forward`` stands once.
    """
    python = [frame for frame in stack if frame.file.endswith(".py")]
    if not python or not _LINEAR.search(python[0].file) or python[0].name != "forward":
        return False
    own = [f for f in python if f.name == "forward" and _MODELING.search(f.file)]
    return len(own) == 1


def _traced(made: Frame, phase: str) -> Category:
    """What a traced allocation is for: its operator stands for the function, its module for the
    file.
    """
    if "workspace" in made.name.lower():
        return "workspaces"
    if made.name == "resize_":  # FSDP, which gathers a layer's parameters into a storage
        return "communication"
    if phase == "setup":  # gradients and the optimizer's moments a trace does not tell apart
        return "optimizer_states" if "zeros_like" in made.name else "parameters"
    if phase == "forward" and made.file == _NO_MODULE:  # the loss is no module
        return "logits"
    return _BY_PHASE.get(phase, "unattributed")
