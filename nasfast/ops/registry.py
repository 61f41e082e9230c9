"""The registered operators: namespaces with the same schemas, and one fake kernel and one autograd for all of them.

The compiled extension defines `torch.ops.nasfast` (csrc/library.cpp). This module defines `torch.ops.nasfast_cuda`
where the extension is, for its CUDA kernels and their emulation, and `torch.ops.nasfast_triton` where Triton can run.
Their schemas come from the signatures of the launchers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nasfast.ops import _native, _triton
from nasfast.ops.autograd import autograd_kernel
from nasfast.ops.cuda import conv as cuda_conv

# a library takes its kernels back when it is deleted
_libraries: list[torch.library.Library] = []
_NAMESPACES = {"cpu": "nasfast", "cuda": "nasfast_cuda", "triton": "nasfast_triton"}


def _define_available() -> list[str]:
    """Define the operators of CUDA and Triton where they can run; the names of the backends that have operators now."""
    backends = []
    if _native.extension is not None:
        backends += ["cpu", "cuda"]
        _define("cuda", cuda_conv.conv_bn_act_chain_fwd, cuda_conv.conv_bn_act_chain_bwd)
    if _triton.why_missing() is None:
        from nasfast.ops.triton import bn, conv, mixed

        backends.append("triton")
        _define("triton", bn.bn_act_fwd, bn.bn_act_bwd)
        _define("triton", conv.conv_bn_act_chain_fwd, conv.conv_bn_act_chain_bwd)
        _define("triton", mixed.mixed_bn_fwd, mixed.mixed_bn_bwd)
    return backends


def _define(backend: str, *launchers: Callable[..., Any]) -> None:
    for launcher in launchers:
        name = f"{_NAMESPACES[backend]}::{launcher.__name__}"
        torch.library.define(name, torch.library.infer_schema(launcher, mutates_args=()))
        torch.library.impl(name, ("cpu", "cuda"), launcher)


def operators(backend: str) -> Any:
    """The namespace of torch.ops that holds a backend's operators."""
    return getattr(torch.ops, _NAMESPACES[backend])


def register(
    op: str,
    *,
    forward_fake: Callable[..., Any],
    backward_fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Register the fake kernels and the autograd of `op`_fwd and `op`_bwd for every available backend that has them.

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
    for name in AVAILABLE:
        namespace = _NAMESPACES[name]
        if not hasattr(operators(name), f"{op}_fwd"):
            if name != "cpu":
                continue
            raise RuntimeError(
                f"the compiled library nasfast/_C.so has no operator {op}_fwd, so it was built from an older version: "
                "build it again with pip install --no-build-isolation -e ."
            )
        torch.library.register_fake(f"{namespace}::{op}_fwd", partial(forward_fake, name))
        torch.library.register_fake(f"{namespace}::{op}_bwd", backward_fake)
        formula = partial(backward, getattr(operators(name), f"{op}_bwd"))
        kernel = autograd_kernel(getattr(operators(name), f"{op}_fwd").default, setup_context, formula)
        library = torch.library.Library(namespace, "IMPL")
        library.impl(f"{op}_fwd", kernel, "Autograd", with_keyset=True)
        _libraries.append(library)


AVAILABLE = _define_available()
