"""The registered operators: namespaces with the same schemas, and one fake kernel and one autograd for all of them.

The compiled extension defines `torch.ops.nasfast` (csrc/library.cpp). This module defines `torch.ops.nasfast_cuda`
where the extension is, for its CUDA kernels and their emulation, and `torch.ops.nasfast_triton` as soon as a call names
Triton, which nothing imports before. Their schemas come from the signatures of the launchers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nasfast.ops import _native
from nasfast.ops.autograd import autograd_kernel

# a library takes its kernels back when it is deleted
_libraries: list[torch.library.Library] = []
# backends that have operators now, and what registers every operator's formulas for one more of them
_defined: list[str] = [] if _native.extension is None else ["cpu", "cuda"]
_registrations: list[Callable[[str], None]] = []
_NAMESPACES = {"cpu": "nasfast", "cuda": "nasfast_cuda", "triton": "nasfast_triton"}


def define(backend: str, *launchers: Callable[..., Any]) -> None:
    """Define operators of a backend that have the names, signatures and bodies of these functions."""
    for launcher in launchers:
        name = f"{_NAMESPACES[backend]}::{launcher.__name__}"
        torch.library.define(name, torch.library.infer_schema(launcher, mutates_args=()))
        torch.library.impl(name, ("cpu", "cuda"), launcher)


def operators(backend: str) -> Any:
    """The namespace of torch.ops that holds a backend's operators."""
    if backend == "triton" and backend not in _defined:
        _define_triton()
    return getattr(torch.ops, _NAMESPACES[backend])


def _define_triton() -> None:
    from nasfast.ops import triton

    define("triton", triton.bn_act_fwd, triton.bn_act_bwd)
    _defined.append("triton")
    for register_for in _registrations:
        register_for("triton")


# a compiler runs it instead of tracing it; torch.compiler.assume_constant_result would import Triton here
_define_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register(
    op: str,
    *,
    forward_fake: Callable[..., Any],
    backward_fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Register the fake kernels and the autograd of `op`_fwd and `op`_bwd for every backend that has them.

    Args:
        op: stem of both names.
        forward_fake: fake kernel of `op`_fwd. It gets the name of the backend before the operator's arguments, because
            backends save different tensors.
        backward_fake: fake kernel of `op`_bwd, with the operator's arguments.
        setup_context: see `autograd_kernel`.
        backward: see `autograd_kernel`. It gets the backward operator of its own namespace before the arguments there.

    Raises:
        RuntimeError: the compiled extension is older than the Python code.
    """
    register_for = partial(_register, op, forward_fake, backward_fake, setup_context, backward)
    _registrations.append(register_for)
    for name in _defined:
        register_for(name)


def _register(
    op: str,
    forward_fake: Callable[..., Any],
    backward_fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    name: str,
) -> None:
    """`register` for the backend of this name, if it has the operator."""
    namespace = _NAMESPACES[name]
    if not hasattr(operators(name), f"{op}_fwd"):
        if name != "cpu":
            return
        raise RuntimeError(
            f"the compiled library nasfast/_C.so has no operator {op}_fwd, so it was built from an older version: "
            "build it again with pip install --no-build-isolation -e . (for tests: make install-tests)"
        )
    torch.library.register_fake(f"{namespace}::{op}_fwd", partial(forward_fake, name))
    torch.library.register_fake(f"{namespace}::{op}_bwd", backward_fake)
    formula = partial(backward, getattr(operators(name), f"{op}_bwd"))
    kernel = autograd_kernel(getattr(operators(name), f"{op}_fwd").default, setup_context, formula)
    library = torch.library.Library(namespace, "IMPL")
    library.impl(f"{op}_fwd", kernel, "Autograd", with_keyset=True)
    _libraries.append(library)
