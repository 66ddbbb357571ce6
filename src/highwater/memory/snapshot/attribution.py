"""Attribution: what an allocation was for, by the stack that asked for it.

Frames are asked from the innermost outwards, and the first that tells decides. Of this engine the
rules are exact; of other programs they are PyTorch's own files, then names that libraries share.
Where no frame tells, the phase does that the program named; else it is ``unattributed``.

A backward pass makes gradients and what it needs on the way by the same functions. What is still
there after the pass is a parameter's gradient, the rest the ``backward_pass``.
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
"""The categories, from what stays longest to what nobody knows."""
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
    """Regular expression that is searched in its function's name."""


_RULES_OF = from_json(
    (files("highwater.memory.snapshot") / "attribution.json").read_bytes(),
    dict[Literal["ours", "pytorch", "libraries"], tuple[_Rule, ...]],
)
"""This engine's files, also where they lay when older snapshots were recorded; PyTorch's own files
and functions, without a file functions of C++; libraries that are trained with, and names that
they share.
"""
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
"""Category of an allocation of which only the phase is known."""
_PHASE = "phase"
"""The path of the frame that names the phase in a timeline (memory/trace/replay.py)."""
_NO_MODULE = "no module"
_LAYER = re.compile(r"\.\d+(?=\.|$)")
_MODELING = re.compile(r"/modeling_\w+\.py$")
_LINEAR = re.compile(r"torch/nn/modules/linear\.py$")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/", re.DOTALL)
_PYTORCHS = re.compile(
    r"^torch/|/torch/(_\w+|autograd|cuda|distributed|nn|optim)[/.]|/torch/utils/checkpoint\.py$"
    r"|\.(cpp|cc|c|h|cu|cuh)$|^\?*$|^<"
)
"""Paths of PyTorch, installed or in a checkout, of C++ and of what has none."""
_BETWEEN = re.compile(
    r"_call_impl$|_wrapped_call_impl$|^(_?fn|inner|wrapper|decorate_context|_fn)$"
    r"|unwind|CapturedTraceback|gather_with_cpp|_start$|__libc_start|PyEval_|PyObject_|PyFunction_"
    r"|PyRun_|Py_RunMain|_PyEval|PyVectorcall|method_vectorcall|clone$|CachingAllocator"
)
"""Functions in between that say nothing, as in PyTorch's viewer; the allocator's besides."""
_OPERATOR = re.compile(r"^at::_ops::(?!(?:new_)?empty)(\w+)::")
"""An operator of PyTorch's by its function of C++; what only allocates is none."""


class Attribution:
    """Category and place of each allocation: each frame, path and stack is looked at once."""

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
        """Category of an allocation: by stack, else phase; of a backward pass by its end."""
        stack, phase = allocation.stack, allocation.phase.partition(" ")[0]
        found = self._of_stack(stack) or _BY_PHASE.get(phase, "unattributed")
        if found == "backward_pass" and self._outlives_its_pass(allocation):
            return "gradients"
        return found

    def _place(self, stack: int) -> str:
        """The innermost line that is not PyTorch's own, ``engine/models/loss.py:88 forward``; where
        there is none PyTorch's operator, else its innermost function; empty without a stack.
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
        """Whether a linear layer was called by a model of transformers itself, not by one of its
        parts: its output head. In such a stack the modelling file's ``forward`` stands once.
        """
        frames = self._snapshot.frames
        innermost = next((frames[i] for i in stack if frames[i].file.endswith(".py")), None)
        if innermost is None or innermost.name != "forward" or not _LINEAR.search(innermost.file):
            return False
        return sum(map(self._is_part, stack)) == 1

    def _outlives_its_pass(self, allocation: Allocation) -> bool:
        """Whether an allocation of a backward pass was there when something came after it."""
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
        """Numbers of the events that were in a phase which is no backward pass."""
        return [
            number
            for number, event in enumerate(self._snapshot.events)
            # in a trace an end has the phase of its beginning
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
        """The phase as the program named it, or as a trace has it in its stack."""
        if not is_traced(self._snapshot, stack):
            return phase
        return self._snapshot.frames[self._snapshot.stacks[stack][-1]].name


class LineRules:
    """The rules, of which each pattern is searched once in each path and in each name."""

    def __init__(self) -> None:
        self._of_file = cache(self._rules_of_file)
        self._has_name = cache(lambda rule, name: _NAMES[rule].search(name) is not None)

    def category(self, frame: Frame) -> Category | None:
        """Category of what a line allocates; None where the line does not tell."""
        rules = self._of_file(frame.file)
        found = next((rule for rule in rules if self._has_name(rule, frame.name)), None)
        return None if found is None else _RULES[found].category

    def _rules_of_file(self, file: str) -> Sequence[int]:
        path = _in_packages(file)
        return [rule for rule, pattern in enumerate(_FILES) if pattern.search(path)]


def _in_packages(file: str) -> str:
    """A path as its rules know it: of what is installed only that, and not where."""
    return _PACKAGES.sub("", file.replace("\\", "/"))


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


def _traced(made: Frame, phase: str) -> Category:
    """Category of a traced allocation: its operator is the function, its module the file."""
    if "workspace" in made.name.lower():
        return "workspaces"
    if made.name == "resize_":  # FSDP, which gathers a layer's parameters into a storage
        return "communication"
    if phase == _BACKWARD and made.file != _NO_MODULE:  # a module runs again: recomputed
        return "activations"
    if phase == "setup":  # gradients and the optimizer's moments a trace does not tell apart
        return "optimizer_states" if "zeros" in made.name else "parameters"
    if phase == "forward" and made.file == _NO_MODULE:  # the loss is no module
        return "logits"
    return _BY_PHASE.get(phase, "unattributed")
