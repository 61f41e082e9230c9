"""Chains whose CUDA kernels run in the interpreter, on the memory of CPU tensors.

The host's code decides on launches as for a GPU and writes them down (launches.cpp), and nvcc
makes PTX of the kernels that a call needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .kernels import OPERATORS, compile_ptx, kernel_names, known_kernels, record_for, take_records
from .machine import Machine
from .memory import Global
from .parse import parse
from .translate import Translator

ARCH = 90
# operators whose result is memory that holds nothing yet
NEW = ("aten::new_empty", "aten::empty", "aten::empty_strided", "aten::empty_like")


class _Tensors(TorchDispatchMode):
    """Keeps every tensor that an operator makes, so that its memory outlives the call, filled with NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] in NEW:
            result.view(torch.uint8).fill_(0xFF)
        self.kept += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


@functools.cache
def modules(names: tuple[str, ...]) -> dict[str, Translator]:
    """The kernels of these names in C++."""
    return translators(compile_ptx(names, ARCH))


def translators(text: str) -> dict[str, Translator]:
    """The kernels of a module, by their names in C++."""
    kernels = parse(text)
    return {name: Translator(kernels[entry]) for name, entry in zip(kernel_names(list(kernels)), kernels, strict=True)}


@dataclass
class Interpreted:
    """What the interpreter has run.

    Attributes:
        stages: what each launch did, such as depthwise_forward.
        kernels: the kernel of each launch, in C++.
        change, may_be_new: see `interpreted`.
    """

    stages: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    change: Callable[[str], str] | None = None
    may_be_new: bool = False

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator: write down its launches, then interpret them."""
        with _Tensors() as made:
            result = func._op_dk(torch._C.DispatchKey.Meta, *args, *kwargs.values())
        launches = take_records()
        names = tuple(sorted({launch["name"] for launch in launches}))
        if not names:
            return result
        translated = translators(self.change(compile_ptx(names, ARCH))) if self.change else modules(names)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        spans = [_span(tensor) for tensor in (*given, *made.kept)]
        memory = Global(spans, [_span(weight) for weight in kwargs.get("conv_weights", ())])
        for launch in launches:
            name, parameter = launch["name"], bytes.fromhex(launch["arguments"])
            shape = tuple(launch["grid"]), known_kernels()[name].threads, launch["shared"]
            Machine(translated[name], *shape, parameter, memory, may_be_new=self.may_be_new).run()
            self.stages.append(launch["stage"])
            self.kernels.append(name)
        return result


@contextmanager
def interpreted(
    multiprocessors: int = 2,
    shared_memory: int = 227,
    *,
    change: Callable[[str], str] | None = None,
    may_be_new: bool = False,
) -> Iterator[Interpreted]:
    """Within this context, the CUDA backend interprets its kernels on CPU tensors, for a GPU of this size.

    Args:
        shared_memory: KiB that a block can have.
        change: changes the text of a module before it runs.
        may_be_new: whether kernels may read shared memory that nothing has written, as they do where a tensor has fewer
            channels than a block, and use nothing of it.
    """
    record_for(multiprocessors, shared_memory * 1024)
    take_records()
    run, namespace = Interpreted(change=change, may_be_new=may_be_new), torch.ops.nasfast
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ", NASFAST_EMULATE_CUDA="1"))
        for name in OPERATORS:
            func = getattr(namespace, name).default
            call = lambda *args, func=func, **kwargs: run.call(func, args, kwargs)  # noqa: E731
            stack.enter_context(patch.object(namespace, name, call))
        yield run
