"""The registered operators: two namespaces with the same schemas, and one fake kernel and autograd formula for both.

`torch.ops.nasfast` comes with the compiled extension (csrc/library.cpp). `torch.ops.nasfast_triton` is made here where
Triton can run, and has its schemas from the signatures of the launchers, so that it is there without a compiler too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nasfast.ops import _native, _triton

_NAMESPACES = {"cpu": "nasfast", "triton": "nasfast_triton"}


def _available() -> list[str]:
    here = []
    if _native.extension is not None:
        here.append("cpu")
    if _triton.why_missing() is None:
        here.append("triton")
        _define_triton()
    return here


def _define_triton() -> None:
    from nasfast.ops.triton import bn as bn_triton
    from nasfast.ops.triton import conv as conv_triton
    from nasfast.ops.triton import mixed as mixed_triton

    launchers = (
        bn_triton.bn_act_fwd, bn_triton.bn_act_bwd, conv_triton.conv_bn_act_fwd, conv_triton.conv_bn_act_bwd,
        mixed_triton.mixed_bn_fwd, mixed_triton.mixed_bn_bwd,
    )  # fmt: skip
    for launcher in launchers:
        name = f"{_NAMESPACES['triton']}::{launcher.__name__}"
        torch.library.define(name, torch.library.infer_schema(launcher, mutates_args=()))
        torch.library.impl(name, ("cpu", "cuda"), launcher)


def operators(backend: str) -> Any:
    """The namespace of torch.ops that holds a backend's operators."""
    return torch.ops.nasfast if backend == "cpu" else torch.ops.nasfast_triton


def register(
    op: str,
    *,
    backends: Sequence[str] = ("cpu", "triton"),
    forward_fake: Callable[..., Any],
    backward_fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Register fake kernels and autograd of `op`_fwd and `op`_bwd in every namespace of `backends` that is there.

    forward_fake gets the name of the backend before the operator's arguments, because backends keep different tensors;
    backward gets the backward operator of its own namespace before the arguments autograd gives it.
    """
    for name in (name for name in AVAILABLE if name in backends):
        namespace = _NAMESPACES[name]
        torch.library.register_fake(f"{namespace}::{op}_fwd", partial(forward_fake, name))
        torch.library.register_fake(f"{namespace}::{op}_bwd", backward_fake)
        formula = partial(backward, getattr(operators(name), f"{op}_bwd"))
        torch.library.register_autograd(f"{namespace}::{op}_fwd", formula, setup_context=setup_context)


AVAILABLE = _available()
