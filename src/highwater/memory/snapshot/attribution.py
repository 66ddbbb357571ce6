"""Attribution: the category of an allocation, by the stack that requested it.

Frames are matched from the innermost outwards; the first frame that matches a rule decides. For
this engine the rules are exact; for other programs they are PyTorch's own files, then names that
libraries share. If no frame matches, the phase named by the program decides; else the allocation is
``unattributed``.

A backward pass allocates gradients and temporary tensors by the same functions. An allocation that
outlives the pass is a parameter's gradient, any other is ``backward_pass``.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from itertools import chain
from typing import Literal, NamedTuple, get_args

from highwater.memory.snapshot.history import Allocation
from highwater.memory.snapshot.snapshot import Frame, Snapshot
from highwater.nouns.codec import from_json

Category = Literal[
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "backward_pass",
    "logits",
    "communication",
    "workspaces",
    "unattributed",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""The categories, from the longest-lived to the unknown."""
CATEGORY_WORDS: Mapping[Category, str] = {
    **{name: name.replace("_", " ") for name in CATEGORIES},
    "logits": "logits, loss",
}
"""The categories in words."""


class _Rule(NamedTuple):
    category: Category
    file: str
    """Regular expression that is searched in a frame's path."""
    name: str = ""
    """Regular expression that is searched in the frame's function name."""


_RULES_OF = from_json(
    (files("highwater.memory.snapshot") / "attribution.json").read_bytes(),
    dict[Literal["ours", "pytorch", "libraries"], tuple[_Rule, ...]],
)
"""Rules for this engine's files, also at older paths; for PyTorch's own files and functions
(without a file: functions of C++); for libraries that train, and names that they share."""
_RULES = tuple(chain.from_iterable(_RULES_OF.values()))
_FILES, _NAMES = (
    tuple(re.compile(pattern) for pattern in patterns)
    for patterns in zip(*((rule.file, rule.name) for rule in _RULES), strict=True)
)
_BACKWARD = "backward"
"""First word of the phases of a backward pass."""
_BY_PHASE: Mapping[str, Category] = {
    "build": "parameters",
    "forward": "activations",
    "experience": "activations",
    _BACKWARD: "backward_pass",
    "optimizer": "optimizer_states",
}
"""Category of an allocation whose stack matches no rule, by the first word of its phase."""
_PHASE = "phase"
"""Path of the frame that names the phase in a predicted timeline (memory/trace/replay.py)."""
_NO_MODULE = "no module"
_LAYER = re.compile(r"\.\d+(?=\.|$)")
_MODELING = re.compile(r"/modeling_\w+\.py$")
_LINEAR = re.compile(r"torch/nn/modules/linear\.py$")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/", re.DOTALL)
_PYTORCHS = re.compile(
    r"^torch/|/torch/(_\w+|autograd|cuda|distributed|nn|optim)[/.]|/torch/utils/checkpoint\.py$"
    r"|\.(cpp|cc|c|h|cu|cuh)$|^\?*$|^<"
)
"""Paths of PyTorch, installed or in a checkout, paths of C++ files, and missing paths."""
_BETWEEN = re.compile(
    r"_call_impl$|_wrapped_call_impl$|^(_?fn|inner|wrapper|decorate_context|_fn)$"
    r"|unwind|CapturedTraceback|gather_with_cpp|_start$|__libc_start|PyEval_|PyObject_|PyFunction_"
    r"|PyRun_|Py_RunMain|_PyEval|PyVectorcall|method_vectorcall|clone$|CachingAllocator"
)
"""Functions that only pass a call on, as in PyTorch's viewer, and the allocator's own."""
_OPERATOR = re.compile(r"^at::_ops::(?!(?:new_)?empty)(\w+)::")
"""An operator of PyTorch, by its C++ function; operators that only allocate do not match."""


class Attribution:
    """Says of each allocation what it is for, and which line of which program asked."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._rules = LineRules()
        self.place = cache(self._place)
        frames = snapshot.frames
        self.line = cache(lambda index: shown(frames[index]))
        self.is_between = cache(lambda index: _BETWEEN.search(frames[index].name) is not None)
        self._of_stack = cache(self._category_of_stack)
        self._is_own = cache(lambda file: not _PYTORCHS.search(_in_packages(file)))
        self._is_part = cache(
            lambda i: frames[i].name == "forward" and bool(_MODELING.search(frames[i].file))
        )
        self._is_optimizers = cache(self._is_an_optimizers)

    def category(self, allocation: Allocation) -> Category:
        """What an allocation is for, by its stack or phase; in a backward pass by when it ends."""
        stack, phase = allocation.stack, allocation.phase.partition(" ")[0]
        found = self._of_stack(stack) or _BY_PHASE.get(phase, "unattributed")
        if found == "backward_pass" and self._outlives_its_pass(allocation):
            return "gradients"
        return found

    def _place(self, stack: int) -> str:
        """The innermost line of a stack outside PyTorch, ``engine/models/loss.py:88 forward``; else
        PyTorch's operator, else the innermost function; empty for an empty stack.
        """
        indices = self._snapshot.stacks[stack]
        if not indices:
            return ""
        if is_traced(self._snapshot, stack):
            return self.line(indices[0])
        told = [index for index in indices if not self.is_between(index)] or indices
        frames = self._snapshot.frames
        own = next((index for index in told if self._is_own(frames[index].file)), None)
        if own is not None:
            return self.line(own)
        operators = (_OPERATOR.match(frames[index].name) for index in told)
        operator = next(filter(None, operators), None)
        return f"aten::{operator[1]}" if operator else self.line(told[0])

    def _category_of_stack(self, stack: int) -> Category | None:
        frames, indices = self._snapshot.frames, self._snapshot.stacks[stack]
        if is_traced(self._snapshot, stack):
            return _traced(frames[indices[0]], frames[indices[-1]].name)
        if self._is_head(indices):
            return "logits"
        return next(filter(None, (self._rules.category(frames[index]) for index in indices)), None)

    def _is_head(self, stack: Sequence[int]) -> bool:
        """True if a stack belongs to the output head: a linear layer that the transformers model
        calls itself, not from a submodule, so that the modelling file's ``forward`` is in it once.
        """
        frames = self._snapshot.frames
        innermost = next((frames[i] for i in stack if frames[i].file.endswith(".py")), None)
        if innermost is None or innermost.name != "forward" or not _LINEAR.search(innermost.file):
            return False
        return sum(map(self._is_part, stack)) == 1

    def _outlives_its_pass(self, allocation: Allocation) -> bool:
        """True if an allocation of a backward pass is live at the next event after the pass."""
        of_phase = self._told_phase(allocation.stack, allocation.phase).startswith(_BACKWARD)
        for later in (self._optimizers_events, self._events_of_other_phases if of_phase else ()):
            following = bisect_right(later, allocation.born)
            if following < len(later) and later[following] <= allocation.died:
                return True
        return False

    @cached_property
    def _optimizers_events(self) -> Sequence[int]:
        events = enumerate(self._snapshot.events)
        return [number for number, event in events if self._is_optimizers(event.stack)]

    @cached_property
    def _events_of_other_phases(self) -> Sequence[int]:
        """Numbers of the events in phases that are no backward pass."""
        return [
            number
            for number, event in enumerate(self._snapshot.events)
            # in a trace, the end of an allocation has the phase of its beginning
            if (event.action == "alloc" or not is_traced(self._snapshot, event.stack))
            and (phase := self._told_phase(event.stack, event.phase))
            and not phase.startswith(_BACKWARD)
        ]

    def _is_an_optimizers(self, stack: int) -> bool:
        if self._of_stack(stack) == "optimizer_states":
            return not is_traced(self._snapshot, stack)
        frames = self._snapshot.frames
        return any(frames[index].name == "zero_grad" for index in self._snapshot.stacks[stack])

    def _told_phase(self, stack: int, phase: str) -> str:
        """The phase that the program named, or that a trace stores in the stack; empty if none."""
        if not is_traced(self._snapshot, stack):
            return phase
        return self._snapshot.frames[self._snapshot.stacks[stack][-1]].name


class LineRules:
    """Rules that tell from a stack frame's file and function what its allocation is for."""

    def __init__(self) -> None:
        self._of_file = cache(self._rules_of_file)
        self._has_name = cache(lambda rule, name: _NAMES[rule].search(name) is not None)

    def category(self, frame: Frame) -> Category | None:
        """Category of what a line of code allocates; None if no rule matches the line."""
        rules = self._of_file(frame.file)
        found = next((rule for rule in rules if self._has_name(rule, frame.name)), None)
        return None if found is None else _RULES[found].category

    def _rules_of_file(self, file: str) -> Sequence[int]:
        path = _in_packages(file)
        return [rule for rule, pattern in enumerate(_FILES) if pattern.search(path)]


def _in_packages(file: str) -> str:
    """A path as the rules match it: of installed packages without the site-packages folder."""
    return _PACKAGES.sub("", file.replace("\\", "/"))


def is_traced(snapshot: Snapshot, stack: int) -> bool:
    """True if a stack is of a traced allocation, whose frames are an operator and a phase."""
    frames = snapshot.stacks[stack]
    return bool(frames) and snapshot.frames[frames[-1]].file == _PHASE


def shown(frame: Frame) -> str:
    """A frame on one line: the last two parts of its path, its line and its function. A traced
    frame is its module, with ``*`` for layer numbers, and its operator.
    """
    if frame.file == _PHASE:
        return frame.name
    path = "/".join(frame.file.replace("\\", "/").split("/")[-2:])
    if not path.endswith(".py"):
        path = _LAYER.sub(".*", path)
    where = f"{path}:{frame.line}" if frame.line else path
    return f"{where} {frame.name}".strip(" ?") or "a frame without a name"


def _traced(made: Frame, phase: str) -> Category:
    """Category of a traced allocation, whose frame has its operator as function, module as file."""
    if "workspace" in made.name.lower():
        return "workspaces"
    if made.name == "resize_":  # FSDP, which gathers a layer's parameters into a storage
        return "communication"
    if phase == _BACKWARD and made.file != _NO_MODULE:  # a module runs again: recomputed
        return "activations"
    if phase == "setup":  # a trace does not tell gradients and the optimizer's moments apart
        return "optimizer_states" if "zeros" in made.name else "parameters"
    if phase == "forward" and made.file == _NO_MODULE:  # the loss is no module
        return "logits"
    return _BY_PHASE.get(phase, "unattributed")
