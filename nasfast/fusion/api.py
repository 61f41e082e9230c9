"""Makes any model use `conv_bn_act_chain`, in place and until `unfuse`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import modules, rule
from nasfast.fusion.dynamo import describe_runs
from nasfast.fusion.find import Findings, find_chains
from nasfast.fusion.match import FusedChain, GraphChain, join
from nasfast.fusion.region import FusedForward, Region, Settings, is_fused
from nasfast.fusion.report import FuseReport, count, listed
from nasfast.ops._native import check_isa
from nasfast.ops.backends import resolve_backend
from nasfast.ops.chain.plan import stage_kind
from nasfast.ops.reference import Stage


def fuse(model: nn.Module, *, only_faster: bool = True, inner: str | Callable[..., Any] = "eager") -> FuseReport:
    """Make the convolution -> BatchNorm -> activation chains of a model run fused, where that is faster.

    It works in place on any module and changes only the `forward` of the model and of the modules that own a chain.
    Classes, submodules, parameters, state_dict, hooks, copies, train() and eval() do not change. Results and running
    statistics are the same up to rounding. The result of a chain may be in channels_last, whatever the input is: code
    behind the module must flatten with `flatten` or `reshape`, not with `view`.

    TorchDynamo captures the model in the first call of each mode, which takes some seconds; guards see every later
    change, and one graph serves all sizes. A model that chooses its path, such as a supernet, is not captured: each
    module in it that owns chains is, by itself. Whatever cannot be captured runs as before and raises what it raised,
    and so does a module that contains hooks, or that takes other ways at every call; the modules inside of it are then
    captured by themselves. The report says which these are. Nothing of a weight is kept between two calls.

    A chain runs as one `nasfast.ops.conv_bn_act_chain` where that is expected to be faster than PyTorch, by its size,
    type, convolutions and what trains; `nasfast.fusion.rule` has the rule and its measurements. Elsewhere it runs
    PyTorch's functions.

    A stage is a convolution without dilation and with equal stride and padding in both directions, then BatchNorm, then
    ReLU, ReLU6, Hardswish, SiLU, Tanh or nothing, as a module or a function. A chain continues while nothing else reads
    the values between its stages, up to the border of a block, which is a module with several convolutions. An addition
    to the result of the last stage belongs to it. Squeeze-and-excitation is an operator of its own (docs/fuse.md).

    Under torch.compile, torch.export, torch.jit.trace, torch.fx, torch.func, forward-mode autograd, and dispatch and
    function modes the model runs unfused; compile with `backend="nasfast"` instead. torch.jit.script, nn.DataParallel
    and copy.copy need `unfuse` first: a shallow copy runs its original's forward. The native backends have no second
    derivatives. Do not call `fuse` while another thread runs a model.

    Args:
        model: any module. Its parameters and buffers are neither changed nor copied.
        only_faster: False runs every chain on the operator, always. Frozen convolutions then keep less memory for
            backward, also where this takes longer.
        inner: the backend of torch.compile for what is in no chain. "eager" runs PyTorch's own functions. "inductor"
            compiles them, which takes minutes for a network, and chains then run only where results are in
            channels_last.

    Returns:
        What is fused, and why the rest is not. It follows the model: after the first forward it says what was captured.

    Raises:
        TypeError: model is not an nn.Module, or inner is neither a name nor a function.
        ValueError: model was compiled by torch.compile, or there is no backend with the name `inner`.
        RuntimeError: NASFAST_ISA names no instruction set that this processor and build have. Whatever is raised, the
            model is as it was.
    """
    _check_module("fuse", model)
    problem = modules.why_opaque(model)
    if problem is not None and not is_fused(model):
        raise ValueError(
            f"fuse: model is {problem}; call fuse on a module that is neither compiled nor scripted and whose class "
            "has the forward that runs"
        )
    _check_inner(inner)
    check_isa()
    findings = find_chains(model)
    regions = {}
    for owner in {*findings.chains, *([""] if findings.whole and findings.chains else [])}:
        least_saving = rule.GUARDS_PER_NORM * len(modules.batch_norms(model.get_submodule(owner)))
        regions[owner] = Region(Settings(not only_faster, inner, least_saving))
    expected = {
        owner: [_expected(chain, owner, top, only_faster) for chain, top in chains]
        for owner, chains in findings.chains.items()
    }
    convs, norms = modules.convolutions(model), modules.batch_norms(model)
    kinds = {name: type(module).__name__ for name, module in {**convs, **norms}.items()}
    notes = _notes(findings, convs, norms)
    report = FuseReport(expected, findings.reasons, kinds, len(convs), _backend(convs.values()), notes, regions)
    # nothing is changed before all of it is known
    unfuse(model)
    for owner, region in regions.items():
        module = model.get_submodule(owner)
        vars(module)["forward"] = FusedForward(module, region)
    return report


def unfuse(model: nn.Module) -> int:
    """Undo `fuse` in a model and all of its submodules.

    Returns:
        Number of modules that have their own forward again.

    Raises:
        TypeError: model is not an nn.Module.
    """
    _check_module("unfuse", model)
    fused = [module for module in model.modules() if is_fused(module)]
    for module in fused:
        del vars(module)["forward"]
    return len(fused)


def _check_module(op: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def _check_inner(inner: object) -> None:
    names = torch._dynamo.list_backends(exclude_tags=())
    if isinstance(inner, str) and inner not in names:
        raise ValueError(f"fuse: inner is {inner!r}; it must be a function, or one of {', '.join(sorted(names))}")
    if not isinstance(inner, str) and not callable(inner):
        raise TypeError(f"fuse: inner must be the name of a backend or a function, got {type(inner).__name__}")


def _expected(chain: GraphChain, owner: str, top: str, only_faster: bool) -> FusedChain:
    """A chain of the trace of the module `top` as it is expected to run, in the model's type and with what trains."""
    stages = chain.stages
    trains = any(stage.params.conv_weight.requires_grad for stage in stages)
    gradients = any(tensor.requires_grad for stage in stages for tensor in stage.params if tensor is not None)
    x = stages[0].params.conv_weight
    try:
        saving = rule.expected_saving(x, stages, trains=trains, gradients=gradients) if only_faster else rule.ALWAYS
        runs = describe_runs(saving, x, trains)
    except RuntimeError:
        runs = "on no backend: the first line says why"
    return replace(chain.describe(runs).with_owner(top), owner=owner)


def _backend(convs: Iterable[_ConvNd]) -> str:
    # to read a parametrized weight computes it, and may change buffers
    weight = next((parameter for conv in convs for parameter in conv.parameters()), torch.empty(0))
    kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
    try:
        return f"{resolve_backend('conv_bn_act_chain', weight.new_empty(0)).name} ({kind})"
    except RuntimeError as error:
        return f"none ({kind}: {error})"


def _notes(findings: Findings, convs: Mapping[str, _ConvNd], norms: Mapping[str, _BatchNorm]) -> list[str]:
    """What may make chains slow, or cost accuracy."""
    stages: dict[str, Stage] = {}
    moving: list[str] = []
    for chain, top in (pair for pairs in findings.chains.values() for pair in pairs):
        for conv, norm, stage in zip(chain.convolutions, chain.batch_norms, chain.stages, strict=True):
            stages[join(top, conv)] = stage
            if not stage.params.conv_weight.requires_grad and _forgets(norms[join(top, norm)]):
                moving.append(join(top, norm))
    in_chains = {name: stages[name] for name in convs if name in stages}
    notes = {
        "in chains will train, so a fused chain keeps the inputs for backward, as PyTorch does; to save that memory, "
        "freeze with requires_grad_(False)": [
            name for name, stage in in_chains.items() if stage.params.conv_weight.requires_grad
        ],
        "in chains on PyTorch's convolution, because the fused operator has no such convolution": [
            name
            for name, (params, stride, padding, groups, *_) in in_chains.items()
            if stage_kind(params.conv_weight.shape, stride, padding, groups) is None
        ],
        "behind frozen convolutions have statistics of an earlier training and are in train mode, where each forward "
        "takes those of its batch and moves the kept ones; a pretrained network loses accuracy by it. With "
        "model.eval(), and scale and shift that train, results are exact and steps faster (docs/finetune.md)": moving,
    }
    return [
        f"{count(len(names), 'BatchNorm' if names is moving else 'convolution')} {text}: {listed(names)}"
        for text, names in notes.items()
        if names
    ]


def _forgets(norm: _BatchNorm) -> bool:
    """Whether it has statistics that it does not use."""
    mean = norm.running_mean
    return norm.training and mean is not None and not mean.is_meta and bool(mean.any())
