"""Fake tensors at less cost."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from highwater.engine.tracer.fake_cuda import QuickFakeMode

OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "new": torch.empty_like,
    "in place": lambda x: x.detach().add_(1),
    "view": lambda x: x[1:].transpose(0, 1),
    "other dtype": lambda x: x.to(torch.float64),
    "promoted by the default dtype": lambda x: x / 2,
    "of an integer": lambda x: x * 2,
    "of a float": lambda x: x * 2.0,
    "of a boolean": lambda x: x * True,
    "several": lambda x: x.split([1, x.shape[0] - 1]),
    "of a list": lambda x: torch.cat([x, x]),
    "of two lists": lambda x: torch._foreach_mul([x, x], [x, x]),
    "written over": lambda x: torch.mm(
        x.detach(), x.detach().T, out=torch.empty(x.shape[0], x.shape[0], dtype=x.dtype)
    ),
}


def tensors() -> list[Tensor]:
    """Each differs from the first in one thing."""
    return [
        torch.zeros(4, 6),
        torch.zeros(6, 4),
        torch.zeros(6, 4).T,
        torch.zeros(5, 6)[1:],
        torch.zeros(4, 6, dtype=torch.bfloat16),
        torch.zeros(4, 6, dtype=torch.long),
        torch.zeros(4, 6, dtype=torch.complex64),
        torch.zeros(4, 6, dtype=torch.complex64).conj(),
        torch.zeros(4, 6, requires_grad=True),
    ]


def told(answer: object) -> list[tuple[object, ...]]:
    each = answer if isinstance(answer, (list, tuple)) else [answer]
    found = []
    for tensor in each:
        assert isinstance(tensor, FakeTensor)
        shape = (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
        )
        found.append((tensor.dtype, *shape, tensor.device, tensor.is_conj(), tensor.requires_grad))
    return found


def answers(mode: FakeTensorMode) -> dict[object, object]:
    FakeTensorMode.cache_clear()
    found: dict[object, object] = {}
    before = torch.get_default_dtype()
    for time in range(2):
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                for name, operator in OPERATORS.items():
                    for number in range(len(tensors())):
                        with mode:
                            found[time, dtype, name, number] = told(operator(tensors()[number]))
            finally:
                torch.set_default_dtype(before)
    return found


def test_whatever_a_tensor_differs_in_it_is_answered_as_pytorch_answers():
    assert answers(QuickFakeMode()) == answers(FakeTensorMode())


def test_what_was_answered_once_is_found_by_the_shorter_key(monkeypatch):
    """Else this PyTorch no longer asks for it, and a trace takes half as long again."""

    def slow(*_: object) -> None:
        raise AssertionError("the longer key was asked for")

    monkeypatch.setattr(FakeTensorMode, "_cache_key", slow)
    FakeTensorMode.cache_clear()
    with QuickFakeMode():
        for _ in range(3):
            torch.zeros(4, 6) + torch.zeros(4, 6)
    assert (FakeTensorMode.cache_info().misses, FakeTensorMode.cache_info().hits) == (2, 7)
