"""MACs of a call: every product of matrices, convolution, attention and recurrence counts, or is named."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast.ops import use_backend

Shape = Sequence[int]


def _recurrence(x: Shape, *weights: Any) -> int:
    """Each weight is used once at each place of a sequence (.., channels)."""
    matrices = [w for w in weights if len(w) == 2]
    return 2 * math.prod(x[:-1]) * sum(map(math.prod, matrices))


def _trilinear(a: Shape, b: Shape, c: Shape, *expand: Any) -> int:
    """Three tensors are multiplied, each with dimensions of size 1 where `expand` says so."""
    shapes = [list(shape) for shape in (a, b, c)]
    for shape, places in zip(shapes, expand, strict=False):
        for place in sorted(places):
            shape.insert(place, 1)
    return 2 * math.prod(map(max, zip(*shapes, strict=True)))


_FORMULAS: Mapping[str, Callable[..., int]] = {
    "aten::mv": lambda a, b: 2 * math.prod(a),
    "aten::addmv": lambda start, a, b: 2 * math.prod(a),
    "aten::addmv_": lambda start, a, b: 2 * math.prod(a),
    "aten::dot": lambda a, b: 2 * math.prod(a),
    "aten::vdot": lambda a, b: 2 * math.prod(a),
    "aten::addr": lambda start, a, b: 2 * math.prod(a) * math.prod(b),
    "aten::addmm_": lambda start, a, b: 2 * math.prod(a) * b[1],
    "aten::addbmm": lambda start, a, b: 2 * math.prod(a) * b[2],
    "aten::baddbmm_": lambda start, a, b: 2 * math.prod(a) * b[2],
    "aten::_cdist_forward": lambda a, b, *_, out_shape: 2 * math.prod(out_shape) * a[-1],
    "aten::_trilinear": _trilinear,
    "aten::mkldnn_rnn_layer": lambda x, first, second, *_: _recurrence(x, first, second),
    "aten::_cudnn_rnn": lambda x, weights, *_: _recurrence(x, *weights),
    "aten::miopen_rnn": lambda x, weights, *_: _recurrence(x, *weights),
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: (
        2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    ),
    "torchvision::deform_conv2d": lambda x, w, *_, out_shape: 2 * math.prod(out_shape) * math.prod(w[1:]),
}
"""Operation -> number of multiplications and additions, by the shapes of its tensors, where torch has no formula."""

_PRODUCTS = re.compile(
    r"(.*_)?([a-z]*mm|mv|addmv|v?dot|addr|matmul|conv\w*|depthwise\w*|rnn|gru|lstm|attention|transformer|fft|linalg|linear"
    r"|trilinear|[cp]dist|euclidean|spsolve|solve|cholesky|ormqr|geqrf)(_.*)?"
)
"""Names of torch's operations that multiply matrices or do as much work; all others cost about what they read."""

_NO_PRODUCTS = {
    "_linalg_check_errors",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "linalg_cross",
    "linalg_vector_norm",
}

_FREE = {"aten", "prim", "prims", "profiler", "torchvision", "_c10d_functional", "c10d", "c10d_functional"}
"""Namespaces whose operations cost nothing that counts, but for `_PRODUCTS`."""


class _Uncounted(TorchDispatchMode):
    """Keeps the names of operations that have no formula and may have MACs; it sees what torch's counter runs."""

    def __init__(self, formulas: Mapping[Any, Any]) -> None:
        super().__init__()
        self._formulas, self.names = formulas, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        multiplies = _PRODUCTS.fullmatch(name) and name not in _NO_PRODUCTS
        every_overload = getattr(getattr(torch.ops, namespace), name)
        if (multiplies or namespace not in _FREE) and every_overload not in self._formulas:
            self.names.add(f"{namespace}::{name}")
        return func(*args, **(kwargs or {}))


def count_macs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, Any, list[str]]:
    """MACs of a call, its result, and the names of operations in it whose MACs are not known.

    Of a sum of products, a multiplication with its addition is one MAC; work element by element, pooling, resizing and
    normalisation are none. `torch.utils.flop_counter.register_flop_formula` adds the formula of another operation.
    """
    # imported here, because it takes 0.15 seconds
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=_known_formulas())
    uncounted = _Uncounted(counter.flop_registry)
    with _as_single_operations(), uncounted, counter:
        result = module(*args, **kwargs)
    return counter.get_total_flops() // 2, result, sorted(uncounted.names)


def _known_formulas() -> dict[Any, Callable[..., int]]:
    """`_FORMULAS` by operation, of packages that are imported and of operations for which torch has no formula."""
    from torch.utils.flop_counter import flop_registry

    formulas = {}
    for full_name, formula in _FORMULAS.items():
        namespace, _, name = full_name.partition("::")
        operation = getattr(getattr(torch.ops, namespace), name, None)
        if operation is not None and operation not in flop_registry:
            formulas[operation] = _of_shapes(formula)
    return formulas


def _of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    """A formula without the arguments that no formula needs; only two need the shape of the result."""

    def with_result(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        needs_result = "out_shape" in formula.__code__.co_varnames
        return formula(*shapes, **({"out_shape": out_shape} if needs_result else {}))

    return with_result


@contextlib.contextmanager
def _as_single_operations() -> Iterator[None]:
    """Within this block, what PyTorch or nasfast would run as one fused operation runs as those that it stands for."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # of MultiheadAttention and TransformerEncoderLayer
    try:
        with torch.compiler.set_stance("force_eager"), use_backend("reference"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
