"""Sizes while a forward is captured: symbols for all of them, and their numbers later.

TorchDynamo computes the sizes of every result with symbols, which takes most of a capture. Those of a BatchNorm and of
an activation are those of the input. PyTorch's rule would also make momentum and eps constants of the graph. By batch
and size PyTorch chooses who computes a convolution, for which the graph would then be; all of them give one layout.

Some forwards compute sizes from sizes, as TensorFlow's padding does, so that each layer's has those of the layer before
several times, and the fourth layer of this kind would take minutes. Then a graph serves images of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map


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
# of who computes a convolution, and of its layout
_CHOICES = ("_select_conv_backend", "_conv_determine_backend_memory_format")
# in PyTorch's rules these are up to ten operators
_ACTIVATIONS = ("hardtanh", "relu6", "hardswish", "hardsigmoid", "silu", "gelu")


def _activation(function: Callable[..., Tensor], in_place: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        if isinstance(x, FakeTensor) and x.is_floating_point():
            return x if in_place else _Like.apply(x)
        return function(x, *arguments, **settings)

    return run


def _global_pool(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, size: Any, *arguments: Any) -> Tensor:
        if isinstance(x, FakeTensor) and x.dim() == 4 and size in (1, (1, 1), [1, 1]):
            strides = function(_with_numbers(x), size).stride()
            y = torch.empty_strided((*x.shape[:2], 1, 1), strides, dtype=x.dtype, device=x.device)
            return _Like.apply(y, x)
        return function(x, size, *arguments)

    return run


def _with_numbers(x: Any) -> Any:
    """A fake tensor like x whose sizes are the numbers of this call."""
    if not isinstance(x, FakeTensor):
        return x
    sizes, strides = (
        [number.node.hint if isinstance(number, torch.SymInt) else number for number in numbers]
        for numbers in (x.shape, x.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)


@contextmanager
def known_sizes() -> Iterator[None]:
    """While this lasts, BatchNorms, activations and means of all pixels of fake tensors give only a type, sizes and
    layout.

    Before a BatchNorm, long sizes become numbers. The layout of a convolution or mean is that of this call.
    """
    batch_norm = torch.batch_norm

    def run(x: Tensor, *arguments: Any) -> Tensor:
        tensors = arguments[:4]
        if isinstance(x, FakeTensor) and x.dim() > 1:
            _fix_long_sizes(x)
            if all(tensor is None or tensor.shape[0] == x.shape[1] for tensor in tensors):
                return _Like.apply(x, *tensors)
        return batch_norm(x, *arguments)

    def by_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **settings: Any) -> Any:
            arguments, settings = tree_map(_with_numbers, (arguments, settings))
            return function(*arguments, **settings)

        return run

    names = [name for name in (*_ACTIVATIONS, *(f"{name}_" for name in _ACTIVATIONS)) if hasattr(torch._C._nn, name)]
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch, "batch_norm", run))
        for name in _CHOICES:
            patches.enter_context(patch.object(torch._C, name, by_numbers(getattr(torch._C, name))))
        for name in names:
            function = getattr(torch._C._nn, name)
            patches.enter_context(patch.object(torch._C._nn, name, _activation(function, name.endswith("_"))))
        pool = torch._C._nn.adaptive_avg_pool2d
        patches.enter_context(patch.object(torch._C._nn, "adaptive_avg_pool2d", _global_pool(pool)))
        yield


def _fix_long_sizes(x: FakeTensor) -> None:
    """Make symbols numbers, for which the graph then is, where they are in a size more often than they may be."""
    for size in x.shape:
        if not isinstance(size, torch.SymInt):
            continue
        node = size.node
        if sum(part.is_Symbol for part in sympy.preorder_traversal(node.expr)) > _MOST_OCCURRENCES:
            for symbol in node.expr.free_symbols:
                int(node.shape_env.create_symintnode(symbol, hint=None))
