"""The autograd of registered operators, and functions that their fake kernels and formulas use.

The formulas belong to the operators, by a kernel for the dispatch key Autograd, and not to a `torch.autograd.Function`
around their calls. Such a Function takes 42 instead of 51 us for a forward and backward of a tiny bn_act (torch 2.15,
one core of an AMD EPYC), but a tracer sees through it: in a graph of `torch.export` or `make_fx` only the operator is
left, whose gradients are then None, with no more than a warning.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def autograd_kernel(
    operator: Any, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel of an operator for the dispatch key Autograd, whose first argument is the set of keys.

    It does what `torch.library.register_autograd` does, for operators that return tensors, of which the first has a
    gradient, and that may have lists of tensors as arguments. That function flattens them with pytrees of any depth at
    each step. A chain of three stages then takes 200 us more per forward and backward, which is longer than a small
    chain computes.

    Args:
        operator: an overload such as torch.ops.nasfast.bn_act_fwd.default.
        setup_context: setup_context(ctx, inputs, output) saves what backward needs; needs_input_grad is one flat list.
        backward: backward(ctx, grad, wants) returns the gradients of the first arguments, in a list for each list of
            tensors, as `wants` says which are wanted. Others are dropped. It is not called if none is wanted.
    """
    arguments = operator._schema.arguments
    if any(argument.has_default_value() for argument in arguments):
        raise ValueError(f"autograd_kernel: the dispatcher leaves out arguments with default values, as {operator} has")
    lists = [i for i, argument in enumerate(arguments) if str(argument.type) == "List[Tensor]"]
    name = operator._schema.name.partition("::")[2].removesuffix("_fwd")

    def call(keyset: Any, args: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, *inputs: Any) -> Any:
        *flat, keyset, ctx.lengths = inputs
        args = _nested(flat, lists, ctx.lengths)
        output = call(keyset, args)
        ctx.set_materialize_grads(False)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        setup_context(ctx, args, output)
        return output

    @once_per_gradient
    def run_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> Any:
        wants = ctx.needs_input_grad
        if grad is None or not any(wants):
            return (None,) * len(wants)
        gradients = _flat(backward(ctx, grad, _nested(wants[:-2], lists, ctx.lengths)), lists)
        gradients += [None] * (len(wants) - len(gradients))
        gradients = [gradient if want else None for gradient, want in zip(gradients, wants, strict=True)]
        # only under create_graph; what is passed on as it came has its own history
        return refuse_second_derivatives(name, grad, *gradients) if torch.is_grad_enabled() else tuple(gradients)

    # profilers show this name, which no class statement could give it
    methods = {"forward": staticmethod(forward), "backward": staticmethod(run_backward)}
    function: Any = type(f"autograd of {operator._schema.name}", (torch.autograd.Function,), methods)

    def run(keyset: Any, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return call(keyset, args)
        return function.apply(*_flat(args, lists), keyset, [len(args[i]) for i in lists])

    return run


def _flat(values: Sequence[Any], lists: Sequence[int]) -> list[Any]:
    """The values, with the elements of those lists in their places."""
    flat: list[Any] = []
    for i, value in enumerate(values):
        if i in lists:
            flat += value
        else:
            flat.append(value)
    return flat


def _nested(flat: Sequence[Any], lists: Sequence[int], lengths: Sequence[int]) -> list[Any]:
    """The values that `_flat` made flat, with lists of these lengths."""
    values = list(flat)
    for i, length in zip(lists, lengths, strict=True):
        values[i : i + length] = [values[i : i + length]]
    return values


def only_reference_serves(x: Tensor) -> bool:
    """Whether no kernel serves x: it has no elements, or something of PyTorch's own is to see what is computed."""
    return 0 in x.shape or transformed()


def transformed() -> bool:
    """Whether tensors may have a tangent, or torch.func, such as vmap, transforms what runs.

    Native operators have no rule for either.
    """
    if torch.compiler.is_compiling():
        return False  # TorchDynamo knows of no stack that is None
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def recorded() -> bool:
    """Whether this thread runs for a compiler, a tracer or a mode, such as FakeTensorMode: they do not see others."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def once_per_gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd.Function that takes a batch of gradients, too, and runs once for each of them.

    `torch.autograd.grad(is_grads_batched=True)`, and so `jacobian(vectorize=True)`, calls it under a vmap of its own;
    `torch.vmap` of a function that calls `torch.autograd.grad` calls it under that one.
    """

    @wraps(backward)
    def run(ctx: Any, grad: Tensor | None, *ignored: Tensor | None) -> Any:
        batch = None if grad is None else _unbatched(grad)
        if batch is None:
            return backward(ctx, grad, *ignored)
        grads, scope, batched = batch
        with scope:
            results = [run(ctx, each, *ignored) for each in grads]
            # a function of one tensor may return its gradient without a tuple
            results = [each if isinstance(each, tuple) else (each,) for each in results]
            stacked = [None if column[0] is None else torch.stack(column) for column in zip(*results, strict=True)]
        return tuple([None if value is None else batched(value) for value in stacked])

    return run


def _unbatched(grad: Tensor) -> tuple[Tensor, AbstractContextManager, Callable[[Tensor], Tensor]] | None:
    """A batch of gradients with its batch in front, what to run in, and what makes such a tensor a batch again.

    None if it is not a batch.
    """
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None and functorch.is_batchedtensor(grad):
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        level = functorch.maybe_get_level(grad)
        value, dim = functorch._unwrap_batched(grad, level)
        scope = retrieve_current_functorch_interpreter().lower()
        assert dim is not None  # the level is that of its batch
        return value.movedim(dim, 0), scope, lambda stacked: functorch._add_batch_dim(stacked, 0, level)
    # the vmap of is_grads_batched, which has other tensors than torch.vmap, whose key has no name in Python
    vmapped = torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")
    if vmapped and "Batched" in repr(torch._C._dispatch_keys(grad)):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        value = torch._remove_batch_dim(grad, level, 1, 0)
        return value, nullcontext(), lambda stacked: torch._add_batch_dim(stacked, 0, level)
    return None


def check_device(*tensors: Tensor | None) -> None:
    """Check that the tensors of a fake kernel are on one device.

    PyTorch calls a fake kernel with tensors of several devices when one of them is on `meta`.

    Raises:
        RuntimeError: they are on several devices.
    """
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    torch._check(len(devices) <= 1, lambda: f"all tensors must be on one device, got {', '.join(sorted(devices))}")


def save_checkpoint_sentinel(y: Tensor) -> None:
    """Called after an operator with the result y has changed statistics, so that an activation checkpoint repeats it.

    The recomputation of `torch.utils.checkpoint` raises as soon as all that backward needs was saved again. Then what
    follows the last operator that saves would not run, but PyTorch's BatchNorm changes its statistics there, too. So an
    empty tensor is saved here, which nothing reads.
    """
    if torch.compiler.is_compiling() or not y.requires_grad:
        return
    if has_saved_tensors_hooks():
        torch.empty(0, requires_grad=True).square()


def has_saved_tensors_hooks() -> bool:
    """Whether somebody, such as a checkpoint, sees what operators save for backward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def refuse_second_derivatives(op: str, grad: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradients, but with an autograd history that raises when they are differentiated; `grad` as it is.

    The backward of a native operator calls this under create_graph. Autograd sees what a native operator computes as a
    constant, so second derivatives would be wrong without an error.
    """
    # an input that requires a gradient, so that the gradients have a history even if they were computed from constants
    tie = torch.zeros((), requires_grad=True)
    refused = _NoSecondDerivative.apply(op, tie, *(None if gradient is grad else gradient for gradient in gradients))
    return tuple(grad if old is grad else new for old, new in zip(gradients, refused, strict=True))


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op: str, tie: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return gradients

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.op}: second derivatives are not implemented in the native {ctx.op}: use backend='reference'"
        )
