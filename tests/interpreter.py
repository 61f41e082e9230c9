"""Triton's interpreter, with bfloat16 as a GPU has it, and if a test needs it with the disorder of a GPU.

As of Triton 3.9 it keeps bfloat16 as the bits in a uint16, cuts digits off where a GPU rounds, and multiplies the bits
themselves in `tl.dot`. Results in bfloat16 mean something only with `repair_bfloat16`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor


def repair_bfloat16() -> None:
    """Patch the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data, source, target, rounding_mode):
        if source == tl.float32 and target == tl.bfloat16:
            bits = data.view(np.uint32)
            nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(data), (bits >> 16) | 0x40, nearest).astype(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        return convert(data, source, target, rounding_mode)

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            rounded(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
        )

    def exact_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = exact_dot


def speed_up() -> None:
    """Leave out work of the interpreter of this process that changes no result: three fifths of its time.

    - A launch replaces the functions of `triton.language`, and so does every call of one kernel function by another.
      Here each function does so once in a launch.
    - Every sum, difference and product of integers is computed again in 64 bits, to find an overflow that is only
      reported under an option that nobody sets.
    - The NumPy type of a Triton type is looked up in a table that is made for every lookup.
    - Every tensor makes its shape anew, as a tuple of constants whose comparison takes several calls. Here tensors of
      one shape share it, and tensors of equal shapes are not broadcast to each other.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    patched, numpy_types = set(), {}

    def patch_once(fn):
        if fn in patched:
            return None
        patched.add(fn)
        scope = patch(fn)
        restore = scope.restore
        # only a launch restores, at its end
        scope.restore = lambda: (patched.clear(), restore())
        return scope

    def numpy_type_once(kind):
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind.scalar)
        return numpy_types[name]

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and [*lhs.type.shape] == [*rhs.type.shape]:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_if_needed
    _share_by_shape()
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_type_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _share_by_shape() -> None:
    """Let the interpreter's tensors, and their types, share what depends only on their shape and type of element."""
    from triton.language.core import block_type, tensor

    make_tensor, make_type = tensor.__init__, block_type.__init__
    shapes, types = {}, {}

    def init_tensor(self, handle, type):
        key = (*type.shape,) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def init_type(self, element_ty, shape):
        sizes = (*(getattr(size, "value", size) for size in shape),)
        key = element_ty.name, sizes
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])
        # pointers of one name may differ
        self.element_ty = element_ty

    tensor.__init__, block_type.__init__ = init_tensor, init_type


@contextmanager
def disturbed() -> Iterator[None]:
    """Run kernels as they may run on a GPU or worse, and refuse what they must not do.

    - The programs of a launch come in another order: backwards, or mixed, in turn.
    - All memory that a launch is given has guards before and behind it, a slice of an allocation too. A write there
      raises an AssertionError, and what is read there is not a number.

    Results must be the same bits as without these changes.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    set_size, set_index, call = builder.set_grid_dim, builder.set_grid_idx, executor.__call__
    random, orders = np.random.default_rng(0), []

    def ordered(self, *size):
        count = math.prod(size)
        orders.append(np.arange(count)[::-1] if len(orders) % 2 == 0 else random.permutation(count))
        return set_size(self, *size)

    def reordered(self, *index):
        place = np.ravel_multi_index(index, self.grid_dim)
        return set_index(self, *map(int, np.unravel_index(orders[-1][place], self.grid_dim)))

    def guarded(self, *args, **kwargs):
        guards = _Guards(dict(zip(self.arg_names, args, strict=False)))
        call(self, *map(guards.placed, args), **kwargs)
        guards.check(self.fn.__name__)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (builder, "set_grid_dim", ordered),
            (builder, "set_grid_idx", reordered),
            (executor, "__call__", guarded),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield


class _Guards:
    """The tensors of one launch, moved to memory with guards.

    A contiguous tensor has guards of its own, unless others overlap it. One with gaps shares those of its allocation,
    because kernels also use what lies between.
    """

    SIZE = 4096
    FILL = 0xFF  # in all floating types a NaN

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._spans: list[_Span] = []
        for name, argument in arguments.items():
            for tensor in _tensors(argument):
                self._add(name, tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        begin, end = 0, storage.nbytes()
        if tensor.is_contiguous():
            begin = tensor.storage_offset() * tensor.element_size()
            end = begin + tensor.numel() * tensor.element_size()
        if begin == end:
            return
        span = _Span(storage, begin, end, name)
        for other in [s for s in self._spans if s.overlaps(span)]:
            self._spans.remove(other)
            span = _Span(
                storage, min(span.begin, other.begin), max(span.end, other.end), f"{other.names}, {span.names}"
            )
        self._spans.append(span)

    def placed(self, argument: Any) -> Any:
        """The argument with its tensors in guarded memory."""
        if isinstance(argument, tuple):
            parts = map(self.placed, argument)
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        if not isinstance(argument, Tensor) or not argument.numel():
            return argument
        at = argument.storage_offset() * argument.element_size()
        (span,) = (s for s in self._spans if s.holds(argument.untyped_storage(), at))
        if span.memory is None:
            span.memory = torch.full((span.end - span.begin + 2 * self.SIZE,), self.FILL, dtype=torch.uint8)
            span.memory[self.SIZE : -self.SIZE] = span.content()
        offset, rest = divmod(at - span.begin + self.SIZE, argument.element_size())
        assert rest == 0
        moved = torch.empty(0, dtype=argument.dtype)
        return moved.set_(span.memory.untyped_storage(), offset, argument.shape, argument.stride())

    def check(self, kernel: str) -> None:
        """Bring the numbers back.

        Raises:
            AssertionError: a guard was written.
        """
        for span in self._spans:
            for side, guard in (("before", span.memory[: self.SIZE]), ("behind", span.memory[-self.SIZE :])):
                written = (guard != self.FILL).nonzero()
                assert not len(written), f"{kernel} writes {side} {span.names}: {len(written)} bytes"
            span.content().copy_(span.memory[self.SIZE : -self.SIZE])


@dataclass
class _Span:
    """Bytes [begin, end) of an allocation, the arguments in them, and the memory that replaces them."""

    storage: torch.UntypedStorage
    begin: int
    end: int
    names: str
    memory: Tensor | None = None

    def overlaps(self, other: _Span) -> bool:
        same = self.storage.data_ptr() == other.storage.data_ptr()
        return same and self.begin < other.end and other.begin < self.end

    def holds(self, storage: torch.UntypedStorage, at: int) -> bool:
        return self.storage.data_ptr() == storage.data_ptr() and self.begin <= at < self.end

    def content(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.storage, self.begin, (self.end - self.begin,), (1,))


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, tuple):
        for part in argument:
            yield from _tensors(part)
    elif isinstance(argument, Tensor):
        yield argument
