"""How a chain runs: on the operator, folded, or as PyTorch's own modules; and what decides that."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from nasfast.fusion import rule
from nasfast.fusion.chain import Chain, Members
from nasfast.fusion.stages import ORDINARY, Folded, Way, in_float32, result_dtype, run_stages, sources_of, transformed
from nasfast.ops import checks
from nasfast.ops.reference import Stage

# decisions that one chain keeps; one for each shape of its input
_KEPT_WAYS = 256
_REQUIRES_GRAD = attrgetter("requires_grad")


class BoundChain:
    """A chain with its present modules, and what was decided and folded for them.

    It holds as long as `Members.places` do not change.

    Args:
        chain: the chain.
        members: its modules.
        always: whether it always runs on the operator.
        measured: for a situation, how the chain was measured to run fastest in it; it is added to.
    """

    def __init__(self, chain: Chain, members: Members, always: bool, measured: dict[tuple, Way]) -> None:
        self.chain, self.members = chain, members
        self._always, self._measured = always, measured
        self._stages = members.stages() or []
        sources = sources_of(self._stages)
        self._ordinary = set(map(type, sources)) <= ORDINARY
        params = [stage.params for stage in self._stages]
        self._weights = [p.conv_weight for p in params]
        others = [t for p in params for t in (p.bn_weight, p.bn_bias, p.conv_bias) if t is not None]
        self._learned = [*self._weights, *others]
        self._batch = any(stage.training for stage in self._stages)
        # the momentum then depends on the number of batches
        self._cumulative = any(bn.momentum is None for bn in members.norms)
        self._ways: dict[tuple, Way] = {}
        # another thread may replace it, so that every method reads it once
        self._folded: Folded | None = None

    def way(self, x: Tensor, *, recorded: bool = False) -> Way | None:
        """How the chain runs on x; None if PyTorch must run it, as with tensors that are not ordinary ones.

        Args:
            x: the input of the chain.
            recorded: whether the chain is recorded in placeholders while its module's own forward runs.
        """
        if type(x) not in ORDINARY or x.dim() != 4 or not self._stages or not self._ordinary or transformed():
            return None
        if self._always:
            return Way.OPERATOR
        around = surroundings(x)
        if around is None:
            return None
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
        stages = self._stages
        if not fits(x, stages):
            return Way.PLAIN
        folds = not batch and not wanted and self._can_fold(x)
        example = rule.example.get()
        if example is not None or (situation not in self._measured and not folds and not rule.knows(x)):
            self._measured[situation] = rule.faster(stages, x, Way.FOLDED if folds else Way.OPERATOR)
            if example is not None:
                example[self.members.convs] = self._measured[situation]
        if situation in self._measured:
            return self._measured[situation]
        if folds:
            return Way.FOLDED if rule.folding_pays(x, in_float32(stages), recorded=recorded) else Way.PLAIN
        return Way.OPERATOR if rule.pays(x, in_float32(stages), trains=trains, recorded=recorded) else Way.PLAIN

    def _can_fold(self, x: Tensor) -> bool:
        """Whether folding is exact and is seen to be outdated: inference tensors have no version counters, and only
        the number of batches tells that a BatchNorm has changed its statistics.
        """
        if x.device.type != "cpu" or x.numel() == 0 or any(bn.num_batches_tracked is None for bn in self.members.norms):
            return False
        return all(t.is_cpu and not t.is_inference() for t in sources_of(self._stages))

    def run_all(self, way: Way, x: Tensor, residual: Tensor | None) -> Tensor:
        """The result of the whole chain with its modules in their present modes, which count the batch."""
        if way is Way.FOLDED:
            return self._run_folded(x, self._stages, residual)
        if self._batch:
            self.members.count_batch()
        stages = self.members.stages() if self._cumulative else None
        return run_stages(x, stages or self._stages, residual)

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
            counters = [bn.num_batches_tracked for bn in self.members.norms if bn.num_batches_tracked is not None]
            folded = self._folded = Folded(stages, dtype, x.shape, counters)
        return folded.run(x, residual)


class CompiledChain(BoundChain):
    """A chain while torch.compile traces it, whose guards see all that is read: nothing is kept, measured or folded.

    Args:
        chain, members, always: as in `BoundChain`.
    """

    def __init__(self, chain: Chain, members: Members, always: bool) -> None:
        self.chain, self.members, self._always = chain, members, always
        self._stages = members.stages() or []
        # both are read again where the chain runs
        self._batch = self._cumulative = True

    def way(self, x: Tensor, *, recorded: bool = False) -> Way | None:
        """As `BoundChain.way`."""
        if not self._stages:
            return None
        trains = torch.is_grad_enabled() and any([stage.params.conv_weight.requires_grad for stage in self._stages])
        return compiled_way(x, self._stages, always=self._always, trains=trains)


def compiled_way(x: Tensor, stages: Sequence[Stage], *, always: bool, trains: bool) -> Way | None:
    """How stages run on x in a compiled graph, where nothing can be measured; None if they are not those of a chain.

    Args:
        always: whether a chain always runs on the operator, and not only where the rule expects a gain.
        trains: whether a convolution trains.
    """
    if x.dim() != 4 or not fits(x, stages):
        return None
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
