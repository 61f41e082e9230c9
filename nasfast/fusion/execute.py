"""How a chain runs: on the operator, folded, or as PyTorch's own modules; and what decides that."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from nasfast.fusion import measure, rule
from nasfast.fusion.chain import ChainStage, Members
from nasfast.fusion.fold import Folded, sources_of
from nasfast.fusion.stages import ORDINARY, Way, in_float32, result_dtype, run_stages, transformed
from nasfast.ops import checks

# decisions that one chain keeps; one for each shape of its input
_KEPT_WAYS = 256


class _Reading:
    """A chain's modules as they were read last, and what was decided for them.

    Attributes:
        stages: the stages.
        learned: the convolutions' weights, then all other parameters.
        batch: whether a BatchNorm normalises with batch statistics.
        only_folded: whether the operator lacks a convolution.
        ordinary: whether no tensor is of a subclass.
        counters: the numbers of batches that a forward increases.
        cumulative: whether a momentum depends on these numbers.
        ways: by all else that a decision depends on, how the chain runs.
        folded: the folded chain, if it was run.
    """

    def __init__(self, members: Members, stages: list[ChainStage]) -> None:
        self.watch = members.watch()
        self.stages = stages
        params = [stage.stage.params for stage in stages]
        others = [t for p in params for t in (p.bn_weight, p.bn_bias, p.conv_bias) if t is not None]
        self.learned = [p.conv_weight for p in params] + others
        self.batch = any(stage.stage.training for stage in stages)
        self.only_folded = any(stage.conv.only_folded for stage in stages)
        self.ordinary = set(map(type, sources_of(stages))) <= ORDINARY
        norms = [bn for bn in members.norms if bn.training and bn.track_running_stats]
        self.counters = [bn.num_batches_tracked for bn in norms if bn.num_batches_tracked is not None]
        self.cumulative = any(bn.momentum is None for bn in norms)
        self.ways: dict[tuple, Way] = {}
        self.folded: Folded | None = None

    def begin(self, members: Members) -> list[ChainStage]:
        """The stages of one forward, whose batch is counted."""
        if self.counters:
            torch._foreach_add_(self.counters, 1)
        stages = members.stages() if self.cumulative else None
        return self.stages if stages is None else stages


class Executor:
    """Runs one chain of one module, and keeps what it has decided and folded.

    Args:
        always: whether the chain always runs on the operator.
        measured: for a situation, how the chain was measured to run fastest in it.

    Attributes:
        members: modules of the chain; None if they can no longer be one, so that the chain runs on PyTorch.
    """

    def __init__(self, always: bool, measured: dict[tuple, Way]) -> None:
        self.members: Members | None = None
        self.measured = dict(measured)
        self._always = always
        # another thread may replace it, so that every method reads it once
        self._reading: _Reading | None = None

    def assign(self, members: Members | None) -> None:
        """Give it the modules of its chain."""
        self.members, self._reading = members, None

    def way(self, x: Tensor, *, recorded: bool) -> Way | None:
        """How the chain runs on x; None if PyTorch must run it, as with tensors that are not ordinary ones.

        Args:
            x: the input of the chain.
            recorded: whether the chain is recorded in placeholders while its module's own forward runs.
        """
        if type(x) not in ORDINARY or x.dim() != 4:
            return None
        reading = self._reading
        if reading is None or not reading.watch.same():
            reading = self._read()
        if reading is None or not reading.ordinary or transformed():
            return None
        if self._always:
            return None if reading.only_folded else Way.OPERATOR
        around = surroundings(x)
        if around is None:
            return None
        # without gradients it does not matter what could have one
        learned = () if around[-1] is None else tuple(map(_REQUIRES_GRAD, reading.learned))
        way = reading.ways.get((around, learned, recorded))
        if way is None:
            if len(reading.ways) >= _KEPT_WAYS:
                reading.ways.clear()
            trains = any(learned[: len(reading.stages)])
            *given, input_wanted = around
            situation = *given, reading.batch, bool(input_wanted) or any(learned), trains
            way = reading.ways[around, learned, recorded] = self._decide(reading, x, situation, recorded)
        if way is not Way.FOLDED:
            reading.folded = None
        return way

    def _read(self) -> _Reading | None:
        members = self.members
        stages = None if members is None else members.stages()
        self._reading = None if members is None or stages is None else _Reading(members, stages)
        return self._reading

    def _decide(self, reading: _Reading, x: Tensor, situation: tuple, recorded: bool) -> Way:
        *_, batch, wanted, trains = situation
        stages = reading.stages
        if not _fits(x, stages):
            return Way.PLAIN
        folds = not batch and not wanted and _can_fold(x, stages)
        if reading.only_folded and not folds:
            return Way.PLAIN
        example = measure.example.get()
        if example is not None or (situation not in self.measured and not folds and not rule.knows(x)):
            self.measured[situation] = measure.faster(stages, x, Way.FOLDED if folds else Way.OPERATOR)
            if example is not None and self.members is not None:
                example[self.members.convs] = self.measured[situation]
        if situation in self.measured:
            return self.measured[situation]
        exact = in_float32(stages)
        if folds:
            return Way.FOLDED if rule.folding_pays(x, exact, recorded=recorded) else Way.PLAIN
        return Way.OPERATOR if rule.pays(x, exact, trains=trains, recorded=recorded) else Way.PLAIN

    def run_all(self, way: Way, x: Tensor, residual: Tensor | None) -> Tensor:
        """The result of the whole chain with its modules in their present modes, which count the batch."""
        reading, members = self._reading, self.members
        assert reading is not None and members is not None  # or there would be no way
        if way is Way.FOLDED:
            return self._run_folded(reading, x, reading.stages, residual)
        return run_stages(x, reading.begin(members), residual)

    def run(self, way: Way, x: Tensor, stages: Sequence[ChainStage], residual: Tensor | None) -> Tensor:
        """The result of these stages, which are all or the first of the chain's."""
        reading = self._reading
        if way is Way.FOLDED and reading is not None and not any([stage.stage.training for stage in stages]):
            return self._run_folded(reading, x, stages, residual)
        return run_stages(x, stages, residual)

    def _run_folded(
        self, reading: _Reading, x: Tensor, stages: Sequence[ChainStage], residual: Tensor | None
    ) -> Tensor:
        dtype = result_dtype(x)
        # another thread may drop it meanwhile
        folded = reading.folded
        if folded is None or not folded.serves(stages, dtype):
            # the tensors may be others than those for which the way was decided
            if not _fits(x, stages) or not _can_fold(x, stages):
                return run_stages(x, stages, residual)
            folded = reading.folded = Folded(stages, dtype, x.shape)
        return folded.run(x, residual)


_REQUIRES_GRAD = attrgetter("requires_grad")


def surroundings(x: Tensor) -> tuple | None:
    """What decides how a chain runs on x, besides its modules: device, shape and type of x, the type of autocast, and
    whether x wants a gradient, None where there are none. None for devices without autocast.
    """
    kind = "cpu" if x.is_cpu else x.device.type
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        return None
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return x.device, x.shape, x.dtype, autocast, x.requires_grad if torch.is_grad_enabled() else None


def _fits(x: Tensor, stages: Sequence[ChainStage]) -> bool:
    """Whether shapes and types are those of a chain."""
    exact = [_undilated(stage) for stage in stages]
    try:
        checks.check_chain("conv_bn_act_chain", x, in_float32(exact), None)
    except (TypeError, ValueError):
        return False
    return True


def _undilated(stage: ChainStage) -> ChainStage:
    """A stage with a result of the same shape, without dilation."""
    if stage.dilation == 1:
        return stage
    params = stage.stage.params
    kernel = [stage.dilation * (length - 1) + 1 for length in params.conv_weight.shape[2:]]
    weight = params.conv_weight[:, :, :1, :1].expand(-1, -1, *kernel)
    return stage._replace(stage=stage.stage._replace(params=params._replace(conv_weight=weight)))


def _can_fold(x: Tensor, stages: Sequence[ChainStage]) -> bool:
    """Whether folding is exact and is seen to be outdated: inference tensors have no version counters."""
    if x.device.type != "cpu" or x.numel() == 0:
        return False
    return all(t.is_cpu and not t.is_inference() for t in sources_of(stages))
