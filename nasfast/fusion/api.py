"""Makes any model use `conv_bn_act_chain`, in place and until `unfuse`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import members, rule
from nasfast.fusion.excite import ExcitationForward
from nasfast.fusion.find import Findings, find_chains
from nasfast.fusion.forward import Binding, ChainForward
from nasfast.fusion.placeholders import StartForward
from nasfast.fusion.replaced import ReplacedForward
from nasfast.fusion.stages import Way
from nasfast.ops.backends import resolve_backend
from nasfast.ops.plan import stage_kind
from nasfast.ops.reference import Stage

# the number of names that are listed for one reason; further ones are only counted
_NAMES_SHOWN = 4
_EXAMPLES = {Way.OPERATOR: "fused", Way.FOLDED: "with folded BatchNorms", Way.PLAIN: "on PyTorch"}


@dataclass(frozen=True)
class FusedChain:
    """One chain of a fused model.

    Attributes:
        owner: path of the module whose forward runs it, "" for the model itself.
        convolutions, batch_norms: paths of its convolutions and BatchNorms, one of each per stage.
        stages: a description of each stage, such as "dw3x3 s2 144 relu6" or "1x1 24->144 relu6".
        residual: whether the operator also makes the addition to the chain's result.
        runs: when it runs on the operator where gradients or batch statistics are needed.
        example: how it runs on inputs like the example that was given; "" if it was not measured.
        recorded: whether it is recorded while its module's own forward runs, which is not well known.
        hooked: paths of modules inside of it that have hooks; while they are there, it runs unfused.
    """

    owner: str
    convolutions: tuple[str, ...]
    batch_norms: tuple[str, ...]
    stages: tuple[str, ...]
    residual: bool
    runs: str
    example: str
    recorded: bool
    hooked: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join([*self.stages, *(["+ residual"] if self.residual else [])])


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
        excitations: paths of the squeeze-and-excitations, each of which can run as one operator.
        left: every convolution and BatchNorm outside of the chains and squeeze-and-excitations.
        convolutions: number of convolutions of the model.
        backend: the backend that serves the model's type on its device, or why none does.
        notes: reasons why a chain may be slow, and how chains run without gradients.
    """

    chains: tuple[FusedChain, ...]
    excitations: tuple[str, ...]
    left: tuple[NotFused, ...]
    convolutions: int
    backend: str
    notes: tuple[str, ...]

    @property
    def fused(self) -> int:
        """Number of convolutions in chains."""
        return sum(len(chain.convolutions) for chain in self.chains)

    def __str__(self) -> str:
        lines = [
            f"{self.fused} of {_count(self.convolutions, 'convolution')} are in "
            f"{_count(len(self.chains), 'chain')} that can run fused; backend: {self.backend}"
        ]
        owners = [chain.owner or "(the model)" for chain in self.chains]
        width = max(map(len, owners), default=0)
        lines += [f"  {owner:<{width}}  {chain}" for owner, chain in zip(owners, self.chains, strict=True)]
        lines += _chains_by("in training mode, or with gradients:", owners, [chain.runs for chain in self.chains])
        if any(chain.example for chain in self.chains):
            examples = [chain.example or "not measured" for chain in self.chains]
            lines += _chains_by("for inputs like the example, in the present mode:", owners, examples)
        if self.excitations:
            lines.append(
                "one operator each on a CPU, in bfloat16 or on large inputs where only BatchNorms train: "
                f"{_count(len(self.excitations), 'squeeze-and-excitation')}: {_listed(list(self.excitations))}"
            )
        reasons: dict[str, list[str]] = defaultdict(list)
        for entry in self.left:
            reasons[f"{entry.kind}: {entry.reason}"].append(entry.name)
        if reasons:
            lines.append("not fused:")
            lines += [f"  {reason}: {_listed(names)}" for reason, names in reasons.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def fuse(model: nn.Module, example: Tensor | Sequence[Any] | None = None, *, only_faster: bool = True) -> FuseReport:
    """Make the convolution -> BatchNorm -> activation chains of a model run fused, where that is faster.

    It works in place on any module and changes only the `forward` of the modules that own a chain, of
    squeeze-and-excitations, and of convolutions with which a chain begins. Classes, submodules, parameters, state_dict,
    hooks, copies, train() and eval() do not change, and every forward reads all settings again. Results and running
    statistics are the same up to rounding. The result of a chain may be in channels_last, whatever the input is: code
    behind it must flatten with `flatten` or `reshape`, not with `view`.

    How a chain runs is decided for each shape and type of its input, mode and what trains:

    - without gradients and with running statistics, on a CPU, its BatchNorms are folded into its convolutions. The
      folded weights are computed again after every change that PyTorch counts (`Tensor._version`), which changes in
      place through `Tensor.data` or a NumPy array are not: write under torch.no_grad(), or call `fuse` again.
    - else as one `nasfast.ops.conv_bn_act_chain`, where that is expected to be faster than PyTorch;
      `nasfast.fusion.rule` has the rule and its measurements. With an example, what was measured decides in its
      situation: its shape and type, the model's present mode, autocast and gradients. This is so for folding, too.
    - else as before. The report says which chains these are.

    A stage is an nn.Conv2d without dilation and with equal stride and padding in both directions, then an
    nn.BatchNorm2d (or timm's BatchNormAct2d), then ReLU, ReLU6, Hardswish, SiLU, Tanh or nothing, as a module or a
    function. A chain continues while nothing else reads the values between its stages, up to the border of a block,
    which is a module with several convolutions. An addition to the result of the last stage belongs to it.
    Squeeze-and-excitation is an operator of its own, in the modules of torchvision and timm and where it is faster
    (docs/fuse.md). `fuse` traces forwards with torch.fx, and where it cannot trace one, it traces the modules that this
    forward calls, such as the candidates of a supernet.

    While a module inside a chain has a hook, the chain runs unfused, so that the hook sees its usual arguments. Under
    torch.compile, the chains of well-known blocks are operators in its graph where the rule or only_faster=False says
    so, and all else runs unfused: fuse first, then compile. Under torch.export, torch.jit.trace, torch.func and
    forward-mode autograd the model runs unfused. torch.jit.script, nn.DataParallel and copy.copy need `unfuse` first: a
    shallow copy runs its original's forward. The native backends have no second derivatives. Do not call `fuse` while
    another thread runs a model.

    `fuse` on a fused model searches it again and forgets what was measured.

    Args:
        model: any module. Its parameters and buffers are neither changed nor copied.
        example: the input of the model, or a sequence of the arguments of its forward. The model runs once on it, and
            each chain is timed fused and on PyTorch, in the model's present mode. That takes about ten steps. None:
            nothing is measured.
        only_faster: False runs every chain on the operator, always. Frozen convolutions then keep less memory for
            backward, also where this takes longer.

    Returns:
        What was fused, and why the rest was not.

    Raises:
        TypeError: model is not an nn.Module, or example neither a tensor nor a list.
        ValueError: model was compiled by torch.compile, or an example is given together with only_faster=False.
        Exception: whatever the model raises for the example. Then nothing is fused.
    """
    _check_module("fuse", model)
    if example is not None and not only_faster:
        raise ValueError("fuse: an example measures which chains are faster; leave it out with only_faster=False")
    if example is not None and not isinstance(example, (Tensor, list, tuple)):
        raise TypeError(
            f"fuse: example must be a tensor, or a list of the forward's arguments, got {type(example).__name__}"
        )
    problem = members.untouchable(model)
    if problem is not None and not isinstance(vars(model).get("forward"), ReplacedForward):
        raise ValueError(
            f"fuse: model is {problem}; call fuse on a module that is neither compiled nor scripted and whose class "
            "has the forward that runs"
        )
    findings = find_chains(model)
    again = unfuse(model) > 0
    _replace_forwards(model, findings, only_faster)
    if example is not None:
        try:
            rule.measure(model, [example] if isinstance(example, Tensor) else list(example))
        except BaseException:
            unfuse(model)
            raise
    chains = _fused_chains(model, findings, only_faster)
    notes = _notes(model, chains, only_faster)
    if again:
        notes.append("the model was fused before: what was measured is forgotten")
    if example is not None and chains and not any(chain.example for chain in chains):
        notes.append("the example reached no chain that could be measured")
    convs, norms = members.convolutions(model), members.batch_norms(model)
    taken = {name for chain in chains for name in (*chain.convolutions, *chain.batch_norms)}
    taken |= {
        f"{path}.{name}".lstrip(".")
        for path in findings.excitations
        for name in members.convolutions(model.get_submodule(path))
    }
    return FuseReport(
        chains=tuple(chains),
        excitations=tuple(findings.excitations),
        left=tuple(
            NotFused(name, type(module).__name__, findings.reasons.get(name, "not behind a fused convolution"))
            for name, module in {**convs, **norms}.items()
            if name not in taken
        ),
        convolutions=len(convs),
        backend=_backend(convs.values()),
        notes=tuple(notes),
    )


def unfuse(model: nn.Module) -> int:
    """Undo `fuse` in a model and all of its submodules.

    Returns:
        Number of chains undone.

    Raises:
        TypeError: model is not an nn.Module.
    """
    _check_module("unfuse", model)
    undone = 0
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, ReplacedForward):
            undone += len(forward.chains) if isinstance(forward, ChainForward) else 0
            del module.forward
    return undone


def _replace_forwards(model: nn.Module, findings: Findings, only_faster: bool) -> None:
    """Give their forwards to the modules that own chains and to the squeeze-and-excitations."""
    for owner, chains in findings.chains.items():
        module = model.get_submodule(owner)
        module.forward = ChainForward(module, [(chain, {}) for chain in chains], always=not only_faster)
        for chain in chains:
            start = module.get_submodule(chain.start)
            start.forward = StartForward(start)
    for module in map(model.get_submodule, findings.excitations):
        module.forward = ExcitationForward(module)


def _check_module(op: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def _fused_chains(model: nn.Module, findings: Findings, only_faster: bool) -> list[FusedChain]:
    """What the report says of the chains of a fused model, in the order of its convolutions."""
    names = {module: name for name, module in model.named_modules()}
    places = {name: i for i, name in enumerate(names.values())}
    chains: list[FusedChain] = []
    for owner in findings.chains:
        module = model.get_submodule(owner)
        forward = vars(module)["forward"]
        binding = Binding(forward)
        recorded = binding.block is None
        for chain, measured in forward.chains:
            convs, norms = ([module.get_submodule(".".join(p)) for p in paths] for paths in (chain.convs, chain.norms))
            stages: list[Stage] = next((found.stages for found in binding.chains if found.chain == chain), [])
            chains.append(
                FusedChain(
                    owner=owner,
                    convolutions=tuple(names[conv] for conv in convs),
                    batch_norms=tuple(names[bn] for bn in norms),
                    stages=tuple(map(_describe, convs, chain.acts)),
                    residual=chain.residual,
                    runs="fused" if not only_faster else _runs(stages, recorded=recorded),
                    example=_EXAMPLES[next(reversed(measured.values()))] if measured else "",
                    recorded=recorded,
                    hooked=tuple(f"{owner}.{path}".lstrip(".") for path in chain.hooked(module)),
                )
            )
    return sorted(chains, key=lambda chain: places[chain.convolutions[0]])


def _runs(stages: Sequence[Stage], *, recorded: bool) -> str:
    """`FusedChain.runs` by the rule."""
    if not stages:
        return "on PyTorch"
    weights = [stage.params.conv_weight for stage in stages]
    x = weights[0].new_empty(0)
    try:
        trains = any(weight.requires_grad for weight in weights)
        least = rule.least_results(x, stages, trains=trains, recorded=recorded)
    except RuntimeError:
        return "on no backend: the first line says why"
    if not rule.knows(x):
        return "fused or on PyTorch, whichever the first forward measures to be faster: the rule is for AVX-512"
    if least is None:
        return f"on PyTorch: the fused operator is not faster in {_type(x)}"
    return "fused" if least == 0 else f"fused where the convolutions give {least:,} numbers or more per thread"


def _describe(conv: Any, act: str) -> str:
    """A stage in words, as in `FusedChain.stages`."""
    depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.groups > 1
    parts = [
        f"{'dw' if depthwise else ''}{conv.kernel_size[0]}x{conv.kernel_size[1]}",
        f"s{conv.stride[0]}" if conv.stride[0] > 1 else "",
        f"g{conv.groups}" if conv.groups > 1 and not depthwise else "",
        f"{conv.out_channels}" if depthwise else f"{conv.in_channels}->{conv.out_channels}",
        "" if act == "identity" else act,
    ]
    return " ".join(filter(None, parts))


def _backend(convs: Iterable[_ConvNd]) -> str:
    # to read a parametrized weight computes it, and may change buffers
    weight = next((parameter for conv in convs for parameter in conv.parameters()), torch.empty(0))
    try:
        return f"{resolve_backend('conv_bn_act_chain', weight.new_empty(0)).name} ({_type(weight)})"
    except RuntimeError as error:
        return f"none ({_type(weight)}: {error})"


def _type(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}"


def _notes(model: nn.Module, chains: list[FusedChain], only_faster: bool) -> list[str]:
    """What may make chains slow, and how they run without gradients."""
    convs: dict[str, Any] = {name: model.get_submodule(name) for chain in chains for name in chain.convolutions}
    on_cpu = only_faster and any(parameter.device.type == "cpu" for parameter in model.parameters())
    notes: list[tuple[str, str, list[str]]] = [
        (
            "convolution",
            "in chains will train, so a fused chain keeps the inputs for backward, as PyTorch does; to save that "
            "memory, freeze with requires_grad_(False)",
            [name for name, conv in convs.items() if conv.weight.requires_grad],
        ),
        (
            "convolution",
            "in chains on PyTorch's convolution, because the fused operator has no such convolution",
            [name for name, conv in convs.items() if not _has_operator(conv)],
        ),
        (
            "module",
            "in chains with hooks; while they are there, the chain runs unfused",
            [path for chain in chains for path in chain.hooked],
        ),
        (
            "chain",
            "in a forward that is not well known: folded only where the convolutions give "
            f"{rule.LEAST_RECORDED:,} numbers or more per stage and thread, and on PyTorch under torch.compile",
            [chain.convolutions[0] for chain in chains if on_cpu and chain.recorded],
        ),
    ]
    told = [f"{_count(len(names), what)} {text}: {_listed(names)}" for what, text, names in notes if names]
    if chains and on_cpu:
        told.append("in eval mode without gradients, chains on a CPU run with their BatchNorms folded")
    return told


def _has_operator(conv: _ConvNd) -> bool:
    """Whether the chain operator has this convolution at some place of a chain."""
    return stage_kind(conv.weight.shape, conv.stride[0], int(conv.padding[0]), conv.groups) is not None


def _chains_by(heading: str, owners: list[str], hows: list[str]) -> list[str]:
    """Lines with the chains of each way."""
    those: dict[str, list[str]] = defaultdict(list)
    for owner, how in zip(owners, hows, strict=True):
        those[how].append(owner)
    lines = [f"  {_count(len(its), 'chain')} {how}: {_listed(its)}" for how, its in those.items()]
    return [heading, *lines] if lines else []


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
