"""Makes any model use `conv_bn_act_chain`, in place and for as long as wanted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import find as chains
from nasfast.fusion.run import ChainForward
from nasfast.ops.backends import resolve_backend
from nasfast.ops.conv import native_place

# names that one reason lists before it only counts
_NAMES_SHOWN = 4


@dataclass(frozen=True)
class FusedChain:
    """One chain of a fused model.

    Attributes:
        owner: path of the module whose forward runs it, "" for the model itself.
        convolutions, batch_norms: paths of its members, one of each per stage.
        stages: what each stage is, such as "dw3x3 s2 144 relu6" or "1x1 24->144 relu6".
        residual: whether what is added to its result is added by the operator.
        then: activation that runs behind it because the operator has none such, or "".
    """

    owner: str
    convolutions: tuple[str, ...]
    batch_norms: tuple[str, ...]
    stages: tuple[str, ...]
    residual: bool
    then: str

    def __str__(self) -> str:
        ends = (["+ residual"] if self.residual else []) + ([f"then {self.then}"] if self.then else [])
        return ", ".join([*self.stages, *ends])


@dataclass(frozen=True)
class NotFused:
    """A convolution or BatchNorm that is in no chain: its path, its type, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did; `str()` of it is a table.

    Attributes:
        chains: every chain.
        left: every convolution and BatchNorm outside of them.
        convolutions: how many the model has.
        ours: how many of them are in fused modules of nasfast, which stay what they are.
        backend: which backend serves float32 on the model's device, or why none does.
        notes: what keeps a chain from being fast.
    """

    chains: tuple[FusedChain, ...]
    left: tuple[NotFused, ...]
    convolutions: int
    ours: int
    backend: str
    notes: tuple[str, ...]

    @property
    def fused(self) -> int:
        """Number of convolutions in chains."""
        return sum(len(chain.convolutions) for chain in self.chains)

    def __str__(self) -> str:
        ours = f", {self.ours} in fused modules of nasfast" if self.ours else ""
        lines = [
            f"{self.fused} of {_count(self.convolutions, 'convolution')} in {_count(len(self.chains), 'chain')}{ours}; "
            f"backend: {self.backend}"
        ]
        owners = [chain.owner or "(the model)" for chain in self.chains]
        width = max(map(len, owners), default=0)
        lines += [f"  {owner:<{width}}  {chain}" for owner, chain in zip(owners, self.chains, strict=True)]
        reasons: dict[str, list[str]] = defaultdict(list)
        for entry in self.left:
            reasons[f"{entry.kind}: {entry.reason}"].append(entry.name)
        if reasons:
            lines.append("not fused:")
            lines += [f"  {reason}: {_listed(names)}" for reason, names in reasons.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def fuse(model: nn.Module) -> FuseReport:
    """Make every convolution -> BatchNorm -> activation chain of a model run as one `nasfast.ops.conv_bn_act_chain`.

    Works in place on any module and changes nothing but the `forward` of the modules that own a chain: classes,
    submodules, parameters, state_dict, hooks, copies, train() and eval() stay what they are, and every setting is read
    at each forward. Results are the same up to rounding, running statistics included. Chains pay where convolutions are
    frozen and BatchNorm trains; a convolution that trains stays correct.

    A stage is an nn.Conv2d without bias, of equal stride and padding in both directions, an nn.BatchNorm2d (or timm's
    BatchNormAct2d), and none, ReLU, ReLU6 or Tanh, as a module or a function. Stages follow each other while nothing
    else reads the values between them, and end at the border of a block, that is a module of several convolutions. An
    addition to the result of the last stage is part of the chain. Chains are found by structure, so that forwards may
    be any code that torch.fx can trace, or that calls modules which it can: a supernet that picks a candidate in
    Python gets fused candidates.

    A forward with a hook on a module inside a chain runs that chain unfused, so that the hook sees what it expects.
    Under torch.compile, torch.export and torch.jit.trace the model runs as if it were not fused; torch.jit.script and
    nn.DataParallel need `unfuse` first. The native backend has no second derivatives. Not for use while another thread
    runs a model, because torch.fx patches nn.Module while it traces.

    Fusing again looks at the model anew; the result is the same if it has not changed.

    Args:
        model: any module; its parameters and buffers are neither changed nor copied.

    Returns:
        What was fused, and why the rest was not.

    Raises:
        TypeError: model is not an nn.Module.
    """
    _check_module("fuse", model)
    findings = chains.find_chains(model)
    unfuse(model)
    owned: dict[str, list[chains.Chain]] = defaultdict(list)
    for found in findings.chains:
        owned[found.owner].append(found.chain)
    for owner, its_chains in owned.items():
        module = model.get_submodule(owner)
        module.forward = ChainForward(module, its_chains)
    return _report(model, findings)


def unfuse(model: nn.Module) -> int:
    """Undo `fuse` in a model and all its submodules, leaving nothing behind.

    Returns:
        Number of chains undone.

    Raises:
        TypeError: model is not an nn.Module.
    """
    _check_module("unfuse", model)
    undone = 0
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, ChainForward):
            undone += len(forward.chains)
            del module.forward
    return undone


def _check_module(op: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def _report(model: nn.Module, findings: chains.Findings) -> FuseReport:
    convs, norms = chains.convolutions(model), chains.batch_norms(model)
    places = {name: i for i, name in enumerate(convs)}
    found_chains = sorted(findings.chains, key=lambda found: places[found.convolutions[0]])
    fused = []
    for found in found_chains:
        acts = zip(found.convolutions, found.chain.acts, strict=True)
        stages = tuple(_describe(convs[name], act) for name, act in acts)
        fused.append(FusedChain(found.owner, found.convolutions, found.norms, stages, found.chain.residual, found.then))
    members = {name for found in found_chains for name in (*found.convolutions, *found.norms)}
    left = [
        NotFused(name, type(module).__name__, findings.reasons.get(name, "not behind a fused convolution"))
        for name, module in {**convs, **norms}.items()
        if name not in members
    ]
    notes = _notes(dict(model.named_modules()), found_chains)
    return FuseReport(tuple(fused), tuple(left), len(convs), len(findings.ours), _backend(convs.values()), tuple(notes))


def _describe(conv: nn.Conv2d, act: str) -> str:
    height, width = conv.kernel_size
    depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.groups > 1
    parts = [f"{'dw' if depthwise else ''}{height}x{width}"]
    if conv.stride[0] > 1:
        parts.append(f"s{conv.stride[0]}")
    if conv.groups > 1 and not depthwise:
        parts.append(f"g{conv.groups}")
    parts.append(f"{conv.out_channels}" if depthwise else f"{conv.in_channels}->{conv.out_channels}")
    return " ".join(parts if act == "identity" else [*parts, act])


def _backend(convs: Iterable[_ConvNd]) -> str:
    weight = next((conv.weight for conv in convs), None)
    device = "cpu" if weight is None else weight.device
    probe = torch.empty(0, device=device)
    try:
        return f"{resolve_backend('conv_bn_act_chain', probe).name} (float32 on {probe.device.type})"
    except RuntimeError as error:
        return f"none ({error})"


def _notes(modules: dict[str, nn.Module], found_chains: list[chains.Found]) -> list[str]:
    notes = []
    trainable = [n for found in found_chains for n in found.convolutions if modules[n].weight.requires_grad]
    if trainable:
        notes.append(
            f"{_count(len(trainable), 'convolution')} in chains trainable: runs, but keeps its input: freeze it with "
            f"requires_grad_(False): {_listed(trainable)}"
        )
    dense = [n for found in found_chains for n in found.convolutions if _native_place(modules[n]) is None]
    if dense:
        notes.append(
            f"{_count(len(dense), 'convolution')} in chains run on PyTorch's convolution, on a CPU between native "
            f"stages: {_listed(dense)}"
        )
    evaluating = [n for found in found_chains for n in found.norms if not modules[n].training]
    if evaluating:
        notes.append(
            f"{_count(len(evaluating), 'BatchNorm')} in chains in eval mode: normalises with its running statistics: "
            f"{_listed(evaluating)}"
        )
    hooked = [
        f"{found.owner}.{path}" if found.owner else path
        for found in found_chains
        for path in found.chain.hooked(modules[found.owner])
    ]
    if hooked:
        notes.append(
            f"{_count(len(hooked), 'module')} in chains with hooks: its chain runs unfused while they are there: "
            f"{_listed(hooked)}"
        )
    return notes


def _native_place(conv: nn.Conv2d) -> str | None:
    return native_place(conv.weight, conv.stride[0], conv.padding[0], conv.groups)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
