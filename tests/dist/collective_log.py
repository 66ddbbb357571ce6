"""What travels between ranks."""

from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Begun(NamedTuple):
    operator: str
    numbers: int
    """How many this rank's tensor has, of a collective that fills another one that of the
    first."""
    within: str
    """What the block called this part of it."""


class CollectiveLog(TorchDispatchMode):
    """Every collective of this process, in order, within ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Begun] = []
        self.within = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            first = next(each for each in tree_leaves(args) if isinstance(each, Tensor))
            operator = func._schema.name.partition("::")[2]
            self.begun.append(Begun(operator, first.numel(), self.within))
        return func(*args, **(kwargs or {}))

    def counts(self, operator: str) -> dict[str, int]:
        """How often one was begun, by what the block called its parts."""
        return dict(Counter(each.within for each in self.begun if each.operator == operator))

    def numbers(self, operator: str) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for each in self.begun:
            if each.operator == operator:
                sums[each.within] += each.numbers
        return dict(sums)
