"""A chain: the names of its modules, its modules in one model, and what decides how it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.fusion import rule
from nasfast.fusion.members import norm_problem, runs_conv, square_conv, stage_of
from nasfast.fusion.replaced import hooks_of
from nasfast.fusion.stages import ORDINARY, Folded, Way, in_float32, result_dtype, run_stages, sources_of, transformed
from nasfast.ops import checks
from nasfast.ops.modules import running_of, settings_of
from nasfast.ops.reference import Stage

Path = tuple[str, ...]

# decisions that one chain keeps; one for each shape of its input
_KEPT_WAYS = 256
_REQUIRES_GRAD = attrgetter("requires_grad")
_CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode", "_parameters")
_NORM_SETTINGS = ("training", "momentum", "eps", "track_running_stats", "_parameters", "_buffers")


@dataclass(frozen=True)
class Chain:
    """One chain of a module. It holds names, so it is also right for every copy of the module.

    Attributes:
        convs, norms: paths of its convolutions and BatchNorms below the module, one of each per stage.
        acts: activation of each stage.
        residual: whether the forward adds something to its result; the chain then makes the addition.
        watched: paths of the modules whose hooks would get a placeholder.
    """

    convs: tuple[Path, ...]
    norms: tuple[Path, ...]
    acts: tuple[str, ...]
    residual: bool
    watched: tuple[Path, ...]

    @property
    def start(self) -> str:
        """Path of the first convolution, as in messages."""
        return ".".join(self.convs[0])

    def below(self, path: Path) -> Chain:
        """The chain as one of the module that has its module at this path."""
        # TorchDynamo does not trace dataclasses.replace
        convs, norms, watched = [tuple([path + p for p in paths]) for paths in (self.convs, self.norms, self.watched)]
        return Chain(convs, norms, self.acts, self.residual, watched)

    def hooked(self, module: nn.Module) -> list[str]:
        """Paths of the watched modules that have hooks now."""
        there = [(path, descendant(module, path)) for path in self.watched]
        return [".".join(path) for path, found in there if found is not None and any(hooks_of(found))]

    def bind(self, module: nn.Module, always: bool, measured: dict[tuple, Way]) -> BoundChain | None:
        """The chain with its modules below this one; None if they can no longer be a chain. See `BoundChain`."""
        convs, norms = [tuple([descendant(module, path) for path in paths]) for paths in (self.convs, self.norms)]
        if not all(map(runs_conv, convs)) or any(not isinstance(bn, _BatchNorm) or norm_problem(bn) for bn in norms):
            return None
        kind = CompiledChain if torch.compiler.is_compiling() else BoundChain
        return kind(self, convs, norms, always, measured)  # type: ignore[arg-type]


class BoundChain:
    """A chain with its present modules, and what was decided and folded for them.

    It holds as long as `places` do not change.

    Args:
        chain: the chain.
        convs, norms: its modules, one of each per stage.
        always: whether it always runs on the operator.
        measured: for a situation, how the chain was measured to run fastest in it; it is added to.
    """

    def __init__(
        self,
        chain: Chain,
        convs: tuple[nn.Conv2d, ...],
        norms: tuple[nn.BatchNorm2d, ...],
        always: bool,
        measured: dict[tuple, Way],
    ) -> None:
        self.chain, self.convs, self.norms = chain, convs, norms
        self._always, self._measured = always, measured
        self.stages = self._present_stages()
        sources = sources_of(self.stages)
        self._ordinary = set(map(type, sources)) <= ORDINARY
        params = [stage.params for stage in self.stages]
        self._weights = [p.conv_weight for p in params]
        others = [t for p in params for t in (p.bn_weight, p.bn_bias, p.conv_bias) if t is not None]
        self._learned = [*self._weights, *others]
        self._batch = any(stage.training for stage in self.stages)
        # the momentum then depends on the number of batches
        self._cumulative = any(bn.momentum is None for bn in norms)
        self._ways: dict[tuple, Way] = {}
        # another thread may replace it, so that every method reads it once
        self._folded: Folded | None = None

    def _present_stages(self) -> list[Stage]:
        """The stages in the present modes, without counting a batch; none if a setting is one that no stage has."""
        stages = [_stage(conv, bn, act) for conv, bn, act in zip(self.convs, self.norms, self.chain.acts, strict=True)]
        found = [stage for stage in stages if stage is not None]
        return found if len(found) == len(stages) else []

    def places(self) -> list[tuple[dict, str]]:
        """Where everything is on which the stages depend, but for the value of a counter of batches; see `Watch`."""
        places: list[tuple[dict, str]] = []
        for conv, bn in zip(self.convs, self.norms, strict=True):
            places += [(vars(conv), name) for name in _CONV_SETTINGS]
            places += [(conv._parameters, "weight"), (conv._parameters, "bias")]
            places += [(vars(bn), name) for name in _NORM_SETTINGS]
            places += [(bn._parameters, "weight"), (bn._parameters, "bias")]
            places += [(bn._buffers, name) for name in ("running_mean", "running_var", "num_batches_tracked")]
        return places

    def way(self, x: Tensor, *, recorded: bool = False) -> Way:
        """How the chain runs on x. PyTorch must run tensors that are not ordinary ones.

        Args:
            x: the input of the chain.
            recorded: whether the chain is recorded in placeholders while its module's own forward runs.
        """
        if type(x) not in ORDINARY or x.dim() != 4 or not self.stages or not self._ordinary or transformed():
            return Way.PLAIN
        if self._always:
            return Way.OPERATOR
        around = surroundings(x)
        if around is None:
            return Way.PLAIN
        # without gradients it does not matter what could have one
        learned = () if around[-1] is None else tuple(map(_REQUIRES_GRAD, self._learned))
        way = self._ways.get((around, learned, recorded))
        if way is None:
            if len(self._ways) >= _KEPT_WAYS:
                self._ways.clear()
            *given, input_wanted = around
            situation = *given, self._batch, bool(input_wanted) or any(learned), any(learned[: len(self._weights)])
            way = self._ways[around, learned, recorded] = self._decide(x, situation, recorded)
        if way is not Way.FOLDED:
            self._folded = None
        return way

    def _decide(self, x: Tensor, situation: tuple, recorded: bool) -> Way:
        *_, batch, wanted, trains = situation
        stages = self.stages
        if not fits(x, stages):
            return Way.PLAIN
        folds = not batch and not wanted and self._can_fold(x)
        if rule.measures.get() or (situation not in self._measured and not folds and not rule.knows(x)):
            self._measured[situation] = rule.faster(stages, x, Way.FOLDED if folds else Way.OPERATOR)
        if situation in self._measured:
            return self._measured[situation]
        if folds:
            return Way.FOLDED if rule.folding_pays(x, in_float32(stages), recorded=recorded) else Way.PLAIN
        return Way.OPERATOR if rule.pays(x, in_float32(stages), trains=trains, recorded=recorded) else Way.PLAIN

    def _can_fold(self, x: Tensor) -> bool:
        """Whether folding is exact and is seen to be outdated: inference tensors have no version counters, and only
        the number of batches tells that a BatchNorm has changed its statistics.
        """
        if x.device.type != "cpu" or x.numel() == 0 or any(bn.num_batches_tracked is None for bn in self.norms):
            return False
        return all(t.is_cpu and not t.is_inference() for t in sources_of(self.stages))

    def run_all(self, way: Way, x: Tensor, residual: Tensor | None) -> Tensor:
        """The result of the whole chain with its modules in their present modes, which count the batch."""
        if way is Way.FOLDED:
            return self._run_folded(x, self.stages, residual)
        if self._batch:
            self._count_batch()
        stages = self._present_stages() if self._cumulative else None
        return run_stages(x, stages or self.stages, residual)

    def _count_batch(self) -> None:
        """Increase the numbers of batches as the forwards of the BatchNorms do."""
        counters = [bn.num_batches_tracked for bn in self.norms if bn.training and bn.track_running_stats]
        if counters := [counter for counter in counters if counter is not None]:
            torch._foreach_add_(counters, 1)

    def run(self, way: Way, x: Tensor, stages: Sequence[Stage], residual: Tensor | None) -> Tensor:
        """The result of these stages, which are all or the first of the chain's."""
        if way is Way.FOLDED and not any([stage.training for stage in stages]):
            return self._run_folded(x, stages, residual)
        return run_stages(x, stages, residual)

    def _run_folded(self, x: Tensor, stages: Sequence[Stage], residual: Tensor | None) -> Tensor:
        dtype = result_dtype(x)
        # another thread may drop it meanwhile
        folded = self._folded
        if folded is None or not folded.serves(stages, dtype):
            # the tensors may be others than those for which the way was decided
            if not fits(x, stages) or not self._can_fold(x):
                return run_stages(x, stages, residual)
            counters = [bn.num_batches_tracked for bn in self.norms if bn.num_batches_tracked is not None]
            folded = self._folded = Folded(stages, dtype, x.shape, counters)
        return folded.run(x, residual)


class CompiledChain(BoundChain):
    """A chain while torch.compile traces it, whose guards see all that is read: nothing is kept, measured or folded.

    Its arguments are those of `BoundChain`.
    """

    def __init__(self, chain, convs, norms, always, measured) -> None:
        self.chain, self.convs, self.norms, self._always = chain, convs, norms, always
        self.stages = self._present_stages()
        # both are read again where the chain runs
        self._batch = self._cumulative = True

    def way(self, x: Tensor, *, recorded: bool = False) -> Way:
        """As `BoundChain.way`."""
        if not self.stages:
            return Way.PLAIN
        trains = torch.is_grad_enabled() and any([stage.params.conv_weight.requires_grad for stage in self.stages])
        return compiled_way(x, self.stages, always=self._always, trains=trains)


def compiled_way(x: Tensor, stages: Sequence[Stage], *, always: bool, trains: bool) -> Way:
    """How stages run on x in a compiled graph, where nothing can be measured.

    Args:
        always: whether a chain always runs on the operator, and not only where the rule expects a gain.
        trains: whether a convolution trains.
    """
    if x.dim() != 4 or not fits(x, stages):
        return Way.PLAIN
    return Way.OPERATOR if always or rule.pays(x, in_float32(stages), trains=trains, recorded=False) else Way.PLAIN


def surroundings(x: Tensor) -> tuple | None:
    """What decides how a chain runs on x, besides its modules: device, shape and type of x, the type of autocast, and
    whether x wants a gradient, None where there are none. None for devices without autocast.
    """
    kind = "cpu" if x.is_cpu else x.device.type
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        return None
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return x.device, x.shape, x.dtype, autocast, x.requires_grad if torch.is_grad_enabled() else None


def fits(x: Tensor, stages: Sequence[Stage]) -> bool:
    """Whether shapes and types are those of a chain."""
    try:
        checks.check_chain("conv_bn_act_chain", x, in_float32(stages), None)
    except (TypeError, ValueError):
        return False
    return True


def descendant(module: nn.Module, path: Path) -> nn.Module | None:
    """The module at this path below a module, or None."""
    found: nn.Module | None = module
    for name in path:
        found = None if found is None else found._modules.get(name)
    return found


def _stage(conv: nn.Conv2d, bn: nn.BatchNorm2d, act: str) -> Stage | None:
    # nn.Module finds parameters by their names ten times as slowly
    weight, affine, buffers = conv._parameters.get("weight"), bn._parameters, bn._buffers
    if weight is None or conv.padding_mode != "zeros":
        return None
    if "running_mean" not in buffers or "running_var" not in buffers or "bias" not in conv._parameters:
        return None
    square = square_conv(weight, conv._parameters["bias"], conv.stride, conv.padding, conv.dilation, conv.groups)
    if square is None:
        return None
    learned = {name: affine.get(name) for name in ("weight", "bias")}
    return stage_of(square, act, **running_of(bn), **learned, **settings_of(bn))
