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
from nasfast.fusion.chain import Chain, descendant
from nasfast.fusion.excite import ExcitationForward
from nasfast.fusion.find import Findings, LocatedChain, find_chains
from nasfast.fusion.forward import ChainForward
from nasfast.fusion.measure import measure
from nasfast.fusion.placeholders import StartForward
from nasfast.fusion.replaced import ReplacedForward
from nasfast.fusion.stages import Way
from nasfast.ops.backends import resolve_backend
from nasfast.ops.plan import stage_kind
from nasfast.ops.reference import Stage

# the number of names that are listed for one reason; further ones are only counted
_NAMES_SHOWN = 4
_INSTEAD = "call fuse on a module that is neither compiled nor scripted and whose class has the forward that runs"


@dataclass(frozen=True)
class FusedChain:
    """One chain of a fused model.

    Attributes:
        owner: path of the module whose forward runs it, "" for the model itself.
        convolutions, batch_norms: paths of its convolutions and BatchNorms, one of each per stage.
        stages: a description of each stage, such as "dw3x3 s2 144 relu6" or "1x1 24->144 relu6".
        residual: whether the operator also makes the addition to the chain's result.
        then: an activation behind the chain that the operator does not have, or "".
        runs: when it runs on the operator where gradients or batch statistics are needed.
        example: how it runs on inputs like the example that was given; "" if it was not measured.
    """

    owner: str
    convolutions: tuple[str, ...]
    batch_norms: tuple[str, ...]
    stages: tuple[str, ...]
    residual: bool
    then: str
    runs: str
    example: str

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
        excitations: paths of the squeeze-and-excitations, each of which can run as one operator.
        left: every convolution and BatchNorm outside of the chains and squeeze-and-excitations.
        convolutions: number of convolutions of the model.
        ours: number of convolutions in fused modules of nasfast, which `fuse` does not change.
        backend: the backend that serves the model's type on its device, or why none does.
        notes: reasons why a chain may be slow, and how chains run without gradients.
    """

    chains: tuple[FusedChain, ...]
    excitations: tuple[str, ...]
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
            f"{self.fused} of {_count(self.convolutions, 'convolution')} are in "
            f"{_count(len(self.chains), 'chain')} that can run fused{ours}; backend: {self.backend}"
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
      folded weights need as much memory as the weights. They are computed again after a forward with gradients or in
      training mode, and after every change that PyTorch counts (`Tensor._version`). It does not count changes in place
      through `Tensor.data` or a NumPy array: write under torch.no_grad() instead, or call `fuse` again. Small chains in
      a forward that is not well known are not folded.
    - else as one `nasfast.ops.conv_bn_act_chain`, where that is expected to be faster than PyTorch;
      `nasfast.fusion.rule` has the rule and its measurements. With an example, what was measured decides in its
      situation: its shape and type, the model's present mode, autocast and gradients. This is so for folding, too.
    - else as before. The report says which chains these are.

    A stage is an nn.Conv2d with equal stride, padding and dilation in both directions, then an nn.BatchNorm2d (or
    timm's BatchNormAct2d), then ReLU, ReLU6, Hardswish, SiLU, Tanh or nothing, as a module or a function. Chains with a
    dilation are folded only, because the operator has none. A chain continues while nothing else reads the values
    between its stages. It ends at the border of a block, which is a module with several convolutions. An addition to
    the result of the last stage belongs to the chain. Squeeze-and-excitation between chains is an operator of its own
    (`nasfast.ops.squeeze_excite`), if it is a module of torchvision or timm with an activation of a stage between its
    convolutions and a sigmoid or hard sigmoid behind them. It runs on a CPU in channels_last, in bfloat16, or in
    float32 if its input has a gradient and at least 131,072 elements and its weights are frozen; otherwise it is not
    faster than PyTorch. `fuse` traces forwards with torch.fx, and where it cannot trace one, it traces the modules that
    this forward calls. So a supernet that chooses a candidate in Python gets fused candidates.

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
    _check_example(example, only_faster)
    problem = members.untouchable(model)
    if problem is not None and not isinstance(vars(model).get("forward"), ReplacedForward):
        raise ValueError(f"fuse: model is {problem}; {_INSTEAD}")
    findings = find_chains(model, folding=only_faster)
    again = unfuse(model) > 0
    _replace_forwards(model, findings, only_faster)
    measured: dict[tuple[nn.Conv2d, ...], Way] = {}
    if example is not None:
        try:
            measured = measure(model, [example] if isinstance(example, Tensor) else list(example))
        except BaseException:
            unfuse(model)
            raise
    more = ["the model was fused before: what was measured is forgotten"] if again else []
    if example is not None and findings.chains and not measured:
        more.append("the example reached no chain that could be measured")
    if only_faster:
        more += _folding_notes(model, findings)
    runs = {located: _runs(model, located, only_faster) for located in findings.chains}
    return _report(model, findings, runs, _examples(model, findings, measured), more)


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
    owned: dict[str, list[Chain]] = defaultdict(list)
    for located in findings.chains:
        owned[located.owner].append(located.chain)
    for owner, its_chains in owned.items():
        module = model.get_submodule(owner)
        module.forward = ChainForward(module, its_chains, always=not only_faster)
        for chain in its_chains:
            start = descendant(module, chain.convs[0])
            start.forward = StartForward(start)
    for module in map(model.get_submodule, findings.excitations):
        module.forward = ExcitationForward(module)


def _check_module(op: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def _check_example(example: Tensor | Sequence[Any] | None, only_faster: bool) -> None:
    if example is None:
        return
    if not only_faster:
        raise ValueError("fuse: an example measures which chains are faster; leave it out with only_faster=False")
    if not isinstance(example, (Tensor, list, tuple)):
        raise TypeError(
            f"fuse: example must be a tensor, or a list of the forward's arguments, got {type(example).__name__}"
        )


def _folding_notes(model: nn.Module, findings: Findings) -> list[str]:
    """How chains run without gradients."""
    if not findings.chains or all(parameter.device.type != "cpu" for parameter in model.parameters()):
        return []
    notes = ["in eval mode without gradients, chains on a CPU run with their BatchNorms folded into the convolutions"]
    recorded = [located.convolutions[0] for located in findings.chains if _is_recorded(model, located)]
    if recorded:
        notes.append(
            f"{_count(len(recorded), 'chain')} in a forward that is not well known: folded only where the "
            f"convolutions give {rule.LEAST_RECORDED:,} numbers or more per stage and thread, and on PyTorch under "
            f"torch.compile: {_listed(recorded)}"
        )
    return notes


def _is_recorded(model: nn.Module, located: LocatedChain) -> bool:
    """Whether a chain of a fused model is recorded while its module's own forward runs."""
    forward = vars(model.get_submodule(located.owner))["forward"]
    return forward.is_recorded()


def _runs(model: nn.Module, located: LocatedChain, only_faster: bool) -> str:
    """`FusedChain.runs`."""
    chain_members = located.chain.members(model.get_submodule(located.owner))
    stages = None if chain_members is None else chain_members.stages()
    if not only_faster:
        return "fused"
    if located.chain.only_folded:
        return "on PyTorch: the fused operator has no dilation"
    if stages is None:
        return "on PyTorch"
    return _rule_says([stage.stage for stage in stages], recorded=_is_recorded(model, located))


def _rule_says(stages: Sequence[Stage], *, recorded: bool) -> str:
    weights = [stage.params.conv_weight for stage in stages]
    x = weights[0].new_empty(0)
    try:
        trains = any(weight.requires_grad for weight in weights)
        least = rule.least_results(x, stages, trains=trains, recorded=recorded)
    except RuntimeError:
        return "on no backend: the first line says why"
    if not rule.knows(x):
        return "fused or on PyTorch, whichever the first forward measures to be faster: the rule is for AVX-512"
    dtype = str(x.dtype).removeprefix("torch.")
    if least is None:
        return f"on PyTorch: the fused operator is not faster in {dtype} on {x.device.type}"
    if least == 0:
        return "fused"
    return (
        f"fused where the convolutions give {least:,} numbers or more per thread; below that PyTorch is expected to be "
        "faster"
    )


def _examples(
    model: nn.Module, findings: Findings, measured: dict[tuple[nn.Conv2d, ...], Way]
) -> dict[LocatedChain, str]:
    """`FusedChain.example` of the chains that were measured."""
    names = {Way.OPERATOR: "fused", Way.FOLDED: "with folded BatchNorms", Way.PLAIN: "on PyTorch"}
    found = {}
    for located in findings.chains:
        chain_members = located.chain.members(model.get_submodule(located.owner))
        if chain_members is not None and chain_members.convs in measured:
            found[located] = names[measured[chain_members.convs]]
    return found


def _report(
    model: nn.Module,
    findings: Findings,
    runs: dict[LocatedChain, str],
    examples: dict[LocatedChain, str],
    more: list[str],
) -> FuseReport:
    convs, norms = members.convolutions(model), members.batch_norms(model)
    places = {name: i for i, name in enumerate(convs)}
    chains = sorted(findings.chains, key=lambda located: places[located.convolutions[0]])
    fused = tuple(_fused_chain(located, convs, runs[located], examples.get(located, "")) for located in chains)
    in_chains = {name for located in chains for name in (*located.convolutions, *located.norms)}
    in_chains |= {
        name for path in findings.excitations for name in convs if f"{name}.".startswith(f"{path}." if path else "")
    }
    left = tuple(
        NotFused(name, type(module).__name__, findings.reasons.get(name, "not behind a fused convolution"))
        for name, module in {**convs, **norms}.items()
        if name not in in_chains
    )
    notes = [*_notes(dict(model.named_modules()), convs, chains), *more]
    excitations, backend = tuple(findings.excitations), _backend(convs.values())
    return FuseReport(fused, excitations, left, len(convs), len(findings.ours), backend, tuple(notes))


def _fused_chain(located: LocatedChain, convs: dict[str, _ConvNd], runs: str, example: str) -> FusedChain:
    acts = zip(located.convolutions, located.chain.acts, strict=True)
    stages = tuple(_describe(convs[name], act) for name, act in acts)
    residual = located.chain.residual
    return FusedChain(located.owner, located.convolutions, located.norms, stages, residual, located.then, runs, example)


def _describe(conv: _ConvNd, act: str) -> str:
    height, width = conv.kernel_size
    depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.groups > 1
    parts = [f"{'dw' if depthwise else ''}{height}x{width}"]
    if conv.stride[0] > 1:
        parts.append(f"s{conv.stride[0]}")
    if conv.dilation[0] > 1:
        parts.append(f"dilation {conv.dilation[0]}")
    if conv.groups > 1 and not depthwise:
        parts.append(f"g{conv.groups}")
    parts.append(f"{conv.out_channels}" if depthwise else f"{conv.in_channels}->{conv.out_channels}")
    return " ".join(parts if act == "identity" else [*parts, act])


def _backend(convs: Iterable[_ConvNd]) -> str:
    # to read a parametrized weight computes it, and may change buffers
    weight = next((parameter for conv in convs for parameter in conv.parameters()), torch.empty(0))
    probe = torch.empty(0, device=weight.device, dtype=weight.dtype)
    kind = f"{str(probe.dtype).removeprefix('torch.')} on {probe.device.type}"
    try:
        return f"{resolve_backend('conv_bn_act_chain', probe).name} ({kind})"
    except RuntimeError as error:
        return f"none ({kind}: {error})"


def _notes(modules: dict[str, nn.Module], convs: dict[str, _ConvNd], chains: list[LocatedChain]) -> list[str]:
    chained = [name for located in chains for name in located.convolutions if not located.chain.only_folded]
    norms = [name for located in chains for name in located.norms]
    notes = []
    trainable = [name for name in chained if convs[name].weight.requires_grad]
    if trainable:
        notes.append(
            f"{_count(len(trainable), 'convolution')} in chains will train, so a fused chain keeps the inputs for "
            f"backward, as PyTorch does; to save that memory, freeze with requires_grad_(False): {_listed(trainable)}"
        )
    others: dict[str, list[str]] = defaultdict(list)
    for name in chained:
        if not _has_operator(convs[name]):
            others[_lacking(convs[name])].append(name)
    for lacking, names in others.items():
        notes.append(
            f"{_count(len(names), 'convolution')} in chains on PyTorch's convolution, because the fused operator has "
            f"no {lacking}: {_listed(names)}"
        )
    evaluating = [name for name in norms if not modules[name].training]
    if evaluating:
        notes.append(
            f"{_count(len(evaluating), 'BatchNorm')} in chains in eval mode, with running statistics: "
            f"{_listed(evaluating)}"
        )
    hooked = [
        f"{located.owner}.{path}" if located.owner else path
        for located in chains
        for path in located.chain.hooked(modules[located.owner])
    ]
    if hooked:
        notes.append(
            f"{_count(len(hooked), 'module')} in chains with hooks; while they are there, the chain runs unfused: "
            f"{_listed(hooked)}"
        )
    return notes


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


def _lacking(conv: _ConvNd) -> str:
    """What the chain operator would need to have this convolution."""
    kernel = conv.kernel_size[0]
    if conv.groups > 1 and conv.weight.shape[1] > 1:
        return "groups of several channels"
    # it has dense convolutions of few channels
    if conv.groups == 1 and stage_kind((2, 1, *conv.kernel_size), conv.stride[0], int(conv.padding[0]), 1) is not None:
        return f"dense {kernel}x{kernel} convolution of so many channels"
    return "such kernel, stride or padding"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
