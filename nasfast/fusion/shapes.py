"""Sizes while a forward is captured: symbols for all of them, and their numbers later.

TorchDynamo computes the sizes of every result with symbols, which takes most of a capture. A BatchNorm's are those of
its input, whatever its momentum and eps are, which PyTorch's rule would make constants of the graph. Some forwards
compute sizes from sizes, as TensorFlow's padding does, so that each layer's has those of the layer before several
times, and the fourth layer of this kind would take minutes. Then a graph serves images of one size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def symbols_of(inputs: Sequence[Any]) -> dict[int, dict[int, sympy.Symbol]]:
    """By the place of each input that has them, the dimensions whose sizes are symbols, each symbol once."""
    found: dict[int, dict[int, sympy.Symbol]] = {}
    seen: set[sympy.Symbol] = set()
    for place, value in enumerate(inputs):
        for dim, size in enumerate(sizes_of(value) if isinstance(value, Tensor) else ()):
            if isinstance(size, sympy.Symbol) and size not in seen:
                seen.add(size)
                found.setdefault(place, {})[dim] = size
    return found


def sizes_of(x: Tensor) -> list[int | sympy.Expr]:
    """The sizes of a tensor, as expressions of symbols where they are not known."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in x.shape]


def numbers_of(sizes: Sequence[int | sympy.Expr], numbers: Mapping[sympy.Symbol, int]) -> list[int]:
    """Sizes in which each symbol has its number."""
    return [size if isinstance(size, int) else int(size.xreplace(numbers)) for size in sizes]


class _Like(torch.autograd.Function):
    """A tensor like the first one, which has a gradient if one of them has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor | None) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError("fake tensors have no backward")


# of symbols in a size: behind one such padding it is three, behind two it is nine
_MOST_OCCURRENCES = 4


@contextmanager
def batch_norms_without_numbers() -> Iterator[None]:
    """While this lasts, BatchNorms of fake tensors give only a type, sizes and layout; long sizes become numbers."""
    batch_norm = torch.batch_norm

    def run(x: Tensor, *arguments: Any) -> Tensor:
        tensors = arguments[:4]
        if isinstance(x, FakeTensor) and x.dim() > 1:
            _fix_long_sizes(x)
            if all(tensor is None or tensor.shape[0] == x.shape[1] for tensor in tensors):
                return _Like.apply(x, *tensors)
        return batch_norm(x, *arguments)

    torch.batch_norm = run  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.batch_norm = batch_norm


def _fix_long_sizes(x: FakeTensor) -> None:
    """Make symbols numbers, for which the graph then is, where they are in a size more often than they may be."""
    for size in x.shape:
        if not isinstance(size, torch.SymInt):
            continue
        node = size.node
        if sum(part.is_Symbol for part in sympy.preorder_traversal(node.expr)) > _MOST_OCCURRENCES:
            for symbol in node.expr.free_symbols:
                int(node.shape_env.create_symintnode(symbol, hint=None))
