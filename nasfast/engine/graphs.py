"""A step as replays of CUDA graphs, one pair for every (layer, candidate), over static buffers.

All candidates of a layer have the same input and output shape. So one buffer per layer boundary, and one for its
gradient, serve all paths. Between forward and backward, a candidate keeps its tensors in a memory pool of its layer.
The candidates of a layer share this pool, because only one of them runs on a path. A step is about two graph launches
per layer and path, without allocations and without Python for each kernel; head, classifier and loss are one, forward
and backward. Whole paths are not captured, because every step has other paths.

A candidate that is one chain of the CUDA kernels and ends in a BatchNorm defers this to the next layer, which applies
it while it reads its input (nasfast/ops/chain/deferred.py). Which graphs the next candidate replays depends on that: it
is captured once for every way in which it gets its input, of which there are at most three. All of them compute the
same numbers.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nasfast.engine.capture import Capture, CudaCapture
from nasfast.engine.eager import EagerEngine, Engine, StepResult, average_paths
from nasfast.engine.segments import Boundary, ChainSegment, Classifier, Segment, SegmentBuffers
from nasfast.ops.chain.call import cuda_plan
from nasfast.ops.chain.deferred import DeferredNorm, DeferredResult
from nasfast.ops.chain.plan import stage_kind
from nasfast.ops.chain.static import StaticChain
from nasfast.ops.low_precision import LowPrecisionWeights
from nasfast.ops.modules import ConvBNAct, as_chain, begin_stages, has_forward_hooks, run_in_order
from nasfast.ops.tensors import storage_dtype
from nasfast.spaces import Arch
from nasfast.supernet import ModuleSupernet, Supernet
from nasfast.supernet.supernet import ChoiceLayer

_logger = logging.getLogger(__name__)


class SegmentKey(NamedTuple):
    """A captured segment of a layer.

    Attributes:
        choice: the candidate; None where the layer has no other.
        input: whether the segment in front writes the input, defers it, or defers it as a sum with a tensor of its own.
    """

    choice: int | None
    input: Literal["written", "deferred", "deferred sum"]


class EngineError(RuntimeError):
    """Graphs cannot be captured here; the message says why."""


@dataclass
class GraphEngine:
    """Forward and backward of a supernet's sampled paths as replays of graphs captured per (layer, candidate).

    It runs the same kernels in the same order as `EagerEngine`, so results are equal bit for bit if the kernels are
    deterministic. Only on the CUDA kernels gradients differ by roundings: a chain sums up the gradients of a BatchNorm
    that is deferred to it, and stem and head are one chain each. A candidate is captured when a step first needs it,
    and only then it shows whether its graphs fit into the memory. Afterwards the network must not be moved, and hooks
    and the set of trainable parameters must not change.

    Args:
        net: a supernet on its device, in training mode.
        batch: shape (N, C, H, W) of the images.
        label_smoothing, bf16: as in `EagerEngine`.
        capture: how to capture; None for CUDA graphs.
        strict: raise if a candidate cannot be captured; otherwise warn once and continue eagerly.

    Raises:
        EngineError: the network is not on a CUDA device (without `capture`), or does not run on fake tensors. A step
            raises it, if `strict`, where a candidate cannot be captured.
    """

    net: Supernet
    batch: tuple[int, ...]
    label_smoothing: float = 0.0
    bf16: bool = False
    capture: Capture | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        parameter = next(self.net.parameters())
        self.device = parameter.device
        if self.capture is None and self.device.type != "cuda":
            raise EngineError(f"CUDA graphs need the network on a CUDA device, it is on {self.device}")
        self._trainable = [p for p in self.net.parameters() if p.requires_grad]
        self._low_precision = LowPrecisionWeights(torch.bfloat16) if self.bf16 else None
        # the parameters with a gradient from the last step: a path has few of a supernet's thousands
        self._graded: list[Tensor] = list(self._trainable)
        self._capture = self.capture or CudaCapture(self.device)
        self._layers = self._modules()
        self._allocate(self._boundary_types())
        _lay_out(self.net)
        number = sum(len(choices) for _, choices in self._layers) - bool(len(self.net.head))
        _logger.info("CUDA graphs: the first step of each candidate captures its graphs (%d in all), and waits", number)

    # ---- buffers

    def _modules(self) -> list[tuple[nn.Module, dict[int | None, _Candidate]]]:
        """Module and choices of each layer, from stem to classifier; None is the choice where there is no other."""
        net = self.net
        layers: list[tuple[nn.Module, dict[int | None, _Candidate]]] = [
            (net.stem, {None: _Candidate.sequence(net.stem)})
        ]
        for layer in net.layers:
            layers.append((layer, {choice: _Candidate.choice(layer, choice) for choice in layer.layer.legal}))
        if len(net.head):
            layers.append((net.head, {None: _Candidate.sequence(net.head)}))
        classify = partial(_classify, net, self._low_precision)
        return [*layers, (net.classifier, {None: _Candidate(classify, [net.classifier])})]

    def _name(self, i: int, choice: int | None) -> str:
        """What users call the choice of a layer of `_modules`."""
        if choice is None:
            return "the stem" if i == 0 else "the classifier" if i == len(self._layers) - 1 else "the head"
        return f"layer {i - 1} choice {choice} ({self.net.space.label(i - 1, choice)})"

    def _autocast(self) -> Any:
        # the cache could hold casts from another capture
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def _image_type(self) -> torch.dtype:
        # under autocast a convolution rounds its input; where one comes first, images are rounded as they are copied
        stem = self.net.space.stem_layers
        return torch.bfloat16 if self.bf16 and stem and stem[0].choices[0].kind == "conv" else torch.float32

    def _boundary_types(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape and type of what each layer but the last gives, from a run on fake tensors, which need no memory."""
        types: list[tuple[torch.Size, torch.dtype]] = []
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(self.batch, dtype=self._image_type(), device=self.device, memory_format=torch.channels_last)
            for i, (_, choices) in enumerate(self._layers[:-1]):
                results = []
                for choice, candidate in choices.items():
                    try:
                        with torch.no_grad(), self._autocast():
                            results.append(candidate.run(x))
                    except Exception as error:
                        raise EngineError(
                            f"{self._name(i, choice)} does not run on fake tensors, which give the shapes of the "
                            f"buffers of its graphs: {error}"
                        ) from error
                if len({y.shape for y in results}) > 1:
                    shapes = {(y.shape, y.dtype) for y in results}
                    raise EngineError(f"candidates of one layer have results of different shapes: {shapes}")
                # an identity hands on float32 where its siblings make bfloat16
                dtypes = {y.dtype for y in results}
                widest = torch.float32 if torch.float32 in dtypes and i > 0 and len(dtypes) > 1 else results[0].dtype
                x = results[0].to(widest)
                types.append((x.shape, widest))
        return types

    def _allocate(self, types: list[tuple[torch.Size, torch.dtype]]) -> None:
        def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device, memory_format=torch.channels_last)

        self.images = empty(self.batch, self._image_type())
        self.labels = torch.zeros(self.batch[0], dtype=torch.long, device=self.device)
        # a boundary's gradient is needed if something before it trains
        trains = [any(p.requires_grad for p in module.parameters()) for module, _ in self._layers]
        # layer i computes boundary i + 1 from boundary i
        self._boundaries = [
            Boundary(self.images, None),
            *(Boundary(empty(*t), empty(*t) if any(trains[: i + 1]) else None) for i, t in enumerate(types)),
        ]
        self._deferred: dict[int, DeferredNorm] = {}  # by boundary, for those that a candidate does not write
        # by layer and choice: memory for the gradients of its parameters, and the part of each
        self._gradients: dict[tuple[int, int | None], tuple[Tensor, dict[Tensor, Tensor]]] = {}
        self._segments: list[dict[SegmentKey, Segment]] = [{} for _ in self._layers]
        self._pools = [self._capture.pool() for _ in self._layers]

    def buffers(self) -> Iterator[Tensor]:
        """Every static buffer that a step writes before it reads it, for tests that fill them with NaN."""
        for boundary in self._boundaries[1:]:
            yield boundary.x
            if boundary.grad is not None:
                yield boundary.grad
        yield from (tensor for norm in self._deferred.values() for tensor in norm)
        yield from (gradients for gradients, _ in self._gradients.values())

    # ---- steps

    def _segment(self, i: int, choice: int | None, deferred_input: DeferredResult | None = None) -> Segment:
        """The captured segment of a layer's choice, whose input is written or deferred.

        That of the head goes to the end of the step, because one choice is left there.
        """
        if deferred_input is None:
            key = SegmentKey(choice, "written")
        else:
            key = SegmentKey(choice, "deferred" if deferred_input.added is None else "deferred sum")
        if key in self._segments[i]:
            return self._segments[i][key]
        is_head = len(self.net.layers) < i < len(self._layers) - 1
        try:
            segment = self._new_segment(i, choice, deferred_input)
            if is_head:
                segment = self._new_segment(i + 1, None, segment.result, head=segment)
            segment.set_replays(self._capture.capture(segment.functions(), self._pools[i]))
        except Exception as error:  # an error that is not from the capture is raised again by the eager engine
            advice = ": use a smaller batch, or the eager engine" if isinstance(error, torch.OutOfMemoryError) else ""
            name = "the graph of head, classifier and loss" if is_head else self._name(i, choice)
            raise EngineError(f"{name} could not be captured: {error}{advice}") from error
        self._segments[i][key] = segment
        return segment

    def _new_segment(
        self, i: int, choice: int | None, deferred_input: DeferredResult | None, head: Segment | None = None
    ) -> Segment:
        module, choices = self._layers[i]
        candidate = choices[choice]
        last = i == len(self._layers) - 1
        if (i, choice) not in self._gradients:
            self._gradients[i, choice] = candidate.empty_gradients(self.device)
        gradients, slots = self._gradients[i, choice]
        output = None if last else self._boundaries[i + 1]
        buffers = SegmentBuffers(self._boundaries[i], output, deferred_input, gradients, slots)
        if last:
            return Classifier(
                module=candidate.run,
                buffers=buffers,
                autocast=self._autocast,
                head=head,
                labels=self.labels,
                label_smoothing=self.label_smoothing,
            )
        chain = None if _has_hooks(module) else self._chain(i, candidate.modules, buffers)
        if chain is None:
            return Segment(module=candidate.run, buffers=buffers, autocast=self._autocast)
        return ChainSegment(module=candidate.run, buffers=buffers, autocast=self._autocast, chain=chain)

    def _chain(self, i: int, modules: list[nn.Module], buffers: SegmentBuffers) -> StaticChain | None:
        """The modules of layer i as one chain of the CUDA kernels on these buffers; None if they are no such chain."""
        units, adds_input = as_chain(modules)
        stages = [unit.stage() for unit in units]
        norms = [p for stage in stages for p in (stage.params.bn_weight, stage.params.bn_bias)]
        # one place for each gradient; others are computed from what trains, as by parametrizations
        if len(set(norms)) < len(norms) or {p for p in norms if p.requires_grad} != set(buffers.slots):
            return None
        if not all(isinstance(stage.params.conv_weight, nn.Parameter) for stage in stages):
            return None
        assert buffers.output is not None
        x, dx, y = buffers.input.x, buffers.input.grad, buffers.output.x
        with self._autocast():
            plan = cuda_plan(x.detach().requires_grad_(dx is not None), stages) if stages else None
            if plan is None or plan.subsample > 1 or not x.dtype == y.dtype == storage_dtype(x):
                return None
        defers = units[-1].act_name == "identity"
        if defers and i + 1 not in self._deferred:
            self._deferred[i + 1] = DeferredNorm.empty(y)
        return StaticChain(
            stages=partial(begin_stages, units),
            plan=plan,
            x=x,
            y=y,
            adds_input=adds_input,
            dx=dx,
            gradients=buffers.slots,
            deferred_input=buffers.deferred_input,
            deferred_norm=self._deferred[i + 1] if defers else None,
            copies=self._low_precision,
        )

    def forward_backward(self, x: Tensor, y: Tensor, paths: Sequence[Arch] | None) -> StepResult:
        """See `Engine`. A batch of another shape than `batch`, such as the last of an epoch, runs eagerly."""
        if paths is not None and self._segments and tuple(x.shape) == tuple(self.batch):
            try:
                return self._replay(x, y, paths)
            except EngineError as error:
                if self.strict:
                    raise
                _logger.warning("goes on without CUDA graphs: %s", error)
            # free the memory of graphs and buffers for the eager engine
            self._segments, self._layers, self._boundaries = [], [], []
            self._deferred, self._gradients, self._low_precision = {}, {}, None
            del self.images
        result = EagerEngine(self.net, self.label_smoothing, self.bf16).forward_backward(x, y, paths)
        self._graded = [p for p in self._trainable if p.grad is not None]
        return result

    def _path(self, path: Arch) -> list[Segment]:
        """The captured segments of a path, from the stem to the one with the classifier."""
        segments: list[Segment] = []
        for i, choice in enumerate([None, *self.net.space.check(path), None]):
            segments.append(self._segment(i, choice, segments[-1].result if segments else None))
        return segments

    def _replay(self, x: Tensor, y: Tensor, paths: Sequence[Arch]) -> StepResult:
        """A step on static buffers. The device gets to work before Python looks at the paths.

        Raises:
            EngineError: a segment could not be captured; nothing but buffers has changed.
        """
        if self._low_precision is not None:
            self._low_precision.refresh()
        self.images.copy_(x)
        stem = self._segment(0, None).forward_replay
        assert stem is not None
        stem()
        # a capture runs its segment, so it must come before gradients are summed
        captured = [self._path(path) for path in paths]
        self.labels.copy_(y)
        outcomes: list[StepResult] = []
        ran: dict[int, Segment] = {}  # by memory of the gradients
        for segments in captured:
            for segment in segments if outcomes else segments[1:]:
                if segment.forward_replay is not None:
                    segment.forward_replay()
            for segment in reversed(segments):
                segment.replay_backward(adds=id(segment.buffers.gradients) in ran)
                ran.update((id(part.buffers.gradients), part) for part in segment.parts)
                if not segment.has_input_grad:
                    break
            classifier = segments[-1]
            assert isinstance(classifier, Classifier)
            outcomes.append(StepResult(*torch.stack(classifier.outcome)))  # the next replay writes another there
        self._set_gradients(ran.values())
        return average_paths(outcomes)

    def _set_gradients(self, segments: Iterable[Segment]) -> None:
        """Set `grad` of the parameters whose gradients these segments computed; clear those of the step before."""
        computed = [segment.computed for segment in segments]
        gradients: dict[Tensor, Tensor] = {}
        for slots in computed:
            gradients.update(slots)  # much faster than parameter by parameter, and this runs at every step
        if len(gradients) < sum(map(len, computed)):
            # segments share a parameter, whose gradient is then their sum
            gradients = {}
            for p, gradient in itertools.chain.from_iterable(slots.items() for slots in computed):
                gradients[p] = gradients[p] + gradient if p in gradients else gradient
        for p in self._graded:
            p.grad = None
        for p, gradient in gradients.items():
            p.grad = gradient
        self._graded = list(gradients)


def _classify(net: Supernet, copies: LowPrecisionWeights | None, features: Tensor) -> Tensor:
    """The classifier; the numbers are those of `Supernet.forward`.

    Args:
        net: the supernet.
        copies: of frozen parameters, which a linear classifier without hooks takes; None: as they are.
        features: means over the pixels of what the head gives.
    """
    linear = net.classifier
    if copies is None or type(linear) is not nn.Linear or has_forward_hooks(linear):
        return linear(features)
    weight, bias = (p if p is None or p.requires_grad else copies.get(p) for p in (linear.weight, linear.bias))
    return F.linear(features, weight, bias)


class _Candidate(NamedTuple):
    """One choice of a layer.

    Attributes:
        run: the choice as a function.
        modules: what it calls, in this order.
    """

    run: Callable[[Tensor], Tensor]
    modules: list[nn.Module]

    def empty_gradients(self, device: torch.device) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """Memory for the gradients of the parameters that train, and the part of each, with its strides."""
        parameters = list(dict.fromkeys(p for m in self.modules for p in m.parameters() if p.requires_grad))
        sizes = [p.numel() for p in parameters]
        memory = torch.empty(sum(sizes), device=device)
        parts = zip(parameters, memory.split(sizes), strict=True)
        return memory, {p: part.as_strided(p.shape, p.stride()) for p, part in parts}

    @classmethod
    def sequence(cls, modules: nn.Sequential) -> _Candidate:
        return cls(partial(run_in_order, modules), list(modules))

    @classmethod
    def choice(cls, layer: ChoiceLayer, choice: int) -> _Candidate:
        module = layer.chosen(choice)
        return cls(partial(layer, choice=choice), [] if module is None else [module])


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks see what is inside a module, which a chain on static buffers does not call."""
    backward = any(m._backward_hooks or m._backward_pre_hooks for m in module.modules())
    return backward or has_forward_hooks(module) or any(p._backward_hooks for p in module.parameters())


def _lay_out(net: Supernet) -> None:
    """Lay frozen weights of chains out as the operators read them, which would copy them at every step otherwise."""
    for unit in (module for module in net.modules() if isinstance(module, ConvBNAct) and module.fused):
        conv = unit.conv
        weight, settings = conv.weight, (conv.stride[0], int(conv.padding[0]), conv.groups)
        if not weight.requires_grad and stage_kind(tuple(weight.shape), *settings) is not None:
            weight.data = weight.data.contiguous()


def make_engine(model: nn.Module, name: str, *, batch: tuple[int, ...], label_smoothing: float, bf16: bool) -> Engine:
    """The engine of a training stage.

    Args:
        model: a module on its device, in training mode.
        name: `eager`, `graphs`, or `auto`: graphs for a supernet on a CUDA device.
        batch: shape of the images of a step.

    Raises:
        EngineError: the name is `graphs`, and graphs cannot be captured. `auto` logs the reason and uses eager.
    """
    eager = EagerEngine(model, label_smoothing, bf16)
    if name == "eager":
        return eager
    on_cuda = next(model.parameters()).device.type == "cuda"
    has_candidates = isinstance(model, Supernet) and not isinstance(model, ModuleSupernet)
    if name == "auto" and not (has_candidates and on_cuda):
        return eager
    try:
        if not isinstance(model, Supernet) or not has_candidates:
            raise EngineError(f"graphs are captured per candidate of a Supernet, got {type(model).__name__}")
        return GraphEngine(model, tuple(batch), label_smoothing, bf16, strict=name == "graphs")
    except (EngineError, torch.cuda.OutOfMemoryError) as error:
        if name == "graphs":
            raise
        _logger.warning("runs without CUDA graphs: %s", error)
        return eager
