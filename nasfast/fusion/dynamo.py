"""The backend `torch.compile(model, backend="nasfast")`: chains on our operators, the rest on another backend.

TorchDynamo gives graphs of PyTorch's functions, before autograd. All that a forward decided in Python is guarded and
hooks are part of the graph, so nothing is watched here. A chain becomes one node of the graph:

- where gradients or batch statistics are needed and the rule expects a gain, an `OperatorChain`. The other backend,
  inductor, traces it to operators, forward and backward.
- else, on a CPU, a `FoldedChain`. Such a graph runs as it is, because a compiler gains little behind folded chains and
  would need the folded weights as inputs.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from operator import is_
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from nasfast.fusion import members
from nasfast.fusion.chain import compiled_way, fits
from nasfast.fusion.match import Matcher, TracedStage, adds_in_place
from nasfast.fusion.members import Conv, square_conv, stage_of
from nasfast.fusion.stages import Folded, Way, plain_stages, result_dtype, run_stages, sources_of, transformed
from nasfast.ops.reference import ConvBNParams, Stage

log = logging.getLogger(__name__)
_NORM_ARGUMENTS = signature(F.batch_norm)
# the parameters of a stage without tensors
_NONE = ConvBNParams(*[None] * len(ConvBNParams._fields))  # type: ignore[arg-type]


def compile_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of TorchDynamo; for `torch.compile(model, backend="nasfast", options={...})`.

    Args:
        graph_module, example_inputs: the graph, which is changed, and its inputs.
        options: `inner` is the backend for what is left, a name or a function; by default "eager" for graphs with
            folded chains and where there is no C++ compiler, and otherwise "inductor". `only_faster` is as in
            `nasfast.fuse`.
        mode: None; the modes are inductor's.
        name: not used.

    Raises:
        ValueError: an option or a mode that there is not.
    """
    settings = {"inner": None, "only_faster": True, **(options or {})}
    if unknown := settings.keys() - {"inner", "only_faster"}:
        raise ValueError(f"backend nasfast: unknown options {sorted(unknown)}; it has inner and only_faster")
    if mode is not None:
        raise ValueError(f"backend nasfast: it has no modes, got {mode!r}; leave out mode, or use backend='inductor'")
    inner = settings["inner"] or ("inductor" if _has_cpp_compiler() else "eager")
    folds = settings["inner"] in (None, "eager") and settings["only_faster"]
    ways = fuse_graph(graph_module, folding=folds, always=not settings["only_faster"])
    if ways[Way.FOLDED]:
        inner = "eager"
    log.info("%s chains on the operator, %s folded; the rest is for %s", ways[Way.OPERATOR], ways[Way.FOLDED], inner)
    return torch._dynamo.lookup_backend(inner)(graph_module, list(example_inputs))


def fuse_graph(graph_module: fx.GraphModule, *, folding: bool, always: bool) -> Counter[Way]:
    """Replace the chains in a graph of TorchDynamo by single nodes.

    Args:
        graph_module: its nodes have their results as fake tensors in `meta`.
        folding: whether chains may be folded where the graph has no gradients and most of its convolutions fold.
        always: whether every chain runs on the operator, and not only where the rule expects a gain.

    Returns:
        How many chains run in each way.
    """
    graph = graph_module.graph
    if transformed() or any("functorch" in str(getattr(node.target, "__module__", "")) for node in graph.nodes):
        return Counter()
    matcher = _Functions(graph)
    chains = [_GraphChain.of(stages, add) for stages, add in matcher.chains()]
    learns = any(getattr(_tensor(node), "requires_grad", False) and not _is_input(node) for node in graph.nodes)
    ways = [_way(chain, folding and not learns, always) for chain in chains]
    folded = sum(len(chain.stages) for chain, way in zip(chains, ways, strict=True) if way is Way.FOLDED)
    if folded < len(matcher.inside("")) / 2:
        ways = [_way(chain, False, always) for chain in chains]
    # what reads a chain's result is replaced before it, and then finds it there
    for chain, way in sorted(zip(chains, ways, strict=True), key=lambda one: -matcher.order[one[0].nodes[-1]]):
        if way is not Way.PLAIN:
            _replace(graph_module, chain, way)
    graph.lint()
    graph_module.recompile()
    return Counter(ways)


def _replace(graph_module: fx.GraphModule, chain: _GraphChain, way: Way) -> None:
    """Put one node in the place of a chain's nodes."""
    graph, last = graph_module.graph, chain.nodes[-1]
    settings = [stage._replace(params=_NONE) for stage in chain.stages]
    name = f"{way.value}_chain_of_{last.name}"
    module = (FoldedChain if way is Way.FOLDED else OperatorChain)(settings, chain.in_place)
    graph_module.add_submodule(name, module)
    with graph.inserting_before(last):
        tensors = [tensor for stage in chain.stages for tensor in stage.params]
        fused = graph.call_module(name, (chain.x, chain.residual, *tensors))
    fused.meta = dict(last.meta)
    last.replace_all_uses_with(fused)
    for node in reversed(chain.nodes):
        graph.erase_node(node)


class OperatorChain(nn.Module):
    """A chain on the operator; its BatchNorms do not count the batch, which the graph does.

    Args:
        settings: its stages, without tensors.
        in_place: whether the addition behind it keeps the type of its result.
    """

    def __init__(self, settings: Sequence[Stage], in_place: bool) -> None:
        super().__init__()
        self._settings, self._in_place = settings, in_place

    def forward(self, x: Tensor, residual: Tensor | None, *tensors: Tensor | None) -> Tensor:
        """The result of the chain for (N, C, H, W); tensors are those of its stages, as in `ConvBNParams`."""
        if any([type(length) is not int for length in x.shape]):
            # the sizes were decided on and are guarded; a plan has numbers
            x = x.view([int(length) for length in x.shape])
        return self._finished(run_stages(x, self._stages(tensors), residual), x)

    def _stages(self, tensors: Sequence[Tensor | None]) -> list[Stage]:
        each = len(_NONE)
        params = [ConvBNParams(*tensors[i : i + each]) for i in range(0, len(tensors), each)]  # type: ignore[arg-type]
        return [s._replace(params=p) for s, p in zip(self._settings, params, strict=True)]

    def _finished(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(result_dtype(x)) if self._in_place else y


class FoldedChain(OperatorChain):
    """A chain without gradients, with its BatchNorms folded into its convolutions as long as nothing changes."""

    # another thread may replace it
    _kept: tuple[Folded, tuple[Tensor | None, ...], Tensor] | None = None

    def forward(self, x: Tensor, residual: Tensor | None, *tensors: Tensor | None) -> Tensor:
        """As `OperatorChain.forward`."""
        dtype = result_dtype(x)
        # nothing counts the changes of statistics, and the counters of batches are no inputs of a graph in eval mode
        statistics = torch.cat([t for i in range(3, len(tensors), len(_NONE)) for t in tensors[i : i + 2]])  # type: ignore[misc]
        kept = self._kept
        if (
            kept is None
            or not all(map(is_, tensors, kept[1]))
            or not kept[0].serves(kept[0].stages, dtype)
            or not torch.equal(kept[2], statistics)
        ):
            stages = self._stages(tensors)
            if any(tensor.is_inference() for tensor in sources_of(stages)):
                y = plain_stages(x, stages)
                return self._finished(y if residual is None else y + residual, x)
            kept = self._kept = Folded(stages, dtype, x.shape, []), tensors, statistics
        return self._finished(kept[0].run(x, residual), x)


class _Functions(Matcher):
    """A graph of PyTorch's functions, in which parameters and buffers are inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        inside: dict[str, set[fx.Node]] = {"": set()}
        for conv in filter(self.is_conv, self.order):
            inside[""].add(conv)
            for _, path in self.stack(conv):
                inside.setdefault(path, set()).add(conv)
        self._inside = {path: frozenset(convs) for path, convs in inside.items()}

    def is_conv(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is torch.conv2d

    def conv_problem(self, conv: fx.Node) -> str | None:
        if not isinstance(_tensor(conv), FakeTensor):
            return "its result is no ordinary tensor"
        return "its settings are not those of a stage" if _conv(conv) is None else None

    def norm_problem(self, norm: fx.Node) -> str | None:
        if norm.op != "call_function" or norm.target is not F.batch_norm or len(norm.args) < 5:
            return f"followed by {norm.name}, not by a BatchNorm with affine parameters"
        given = _norm(norm)
        if given["weight"] is None or given["bias"] is None:
            return "its BatchNorm has no affine parameters"
        numbers = (given.get(name, 0.0) for name in ("training", "momentum", "eps"))
        return None if all(isinstance(number, (bool, int, float)) for number in numbers) else "its momentum changes"

    def activation(self, node: fx.Node) -> str | None:
        return members.function_activation(node) if node.op in ("call_function", "call_method") else None

    def inside(self, path: str) -> frozenset:
        return self._inside.get(path, frozenset())

    def repeated(self, node: fx.Node) -> bool:
        if self.is_conv(node) or not isinstance(node.args[1], fx.Node):
            return False
        return sum(user.target is F.batch_norm for user in node.args[1].users) > 1

    def changes_in_place(self, node: fx.Node) -> bool:
        if _is_input(node) or node.op == "output":
            return False
        value = node.meta.get("example_value")
        # what has no value changes a mode, such as autocast
        if value is None or isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return True
        # a counter of batches
        counts = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        return super().changes_in_place(node) and not counts


class _GraphChain(NamedTuple):
    """A chain in a graph; x, the residual and the tensors of the stages are nodes."""

    x: Any
    stages: tuple[Stage, ...]
    residual: Any
    in_place: bool
    nodes: tuple[fx.Node, ...]

    @classmethod
    def of(cls, traced: Sequence[TracedStage], add: fx.Node | None) -> _GraphChain:
        """The chain that a matcher found."""
        stages = []
        for stage in traced:
            conv, norm = _conv(stage.conv), _norm(stage.norm)
            found = None if conv is None else stage_of(conv, stage.act, **norm)
            assert found is not None  # or the matcher would have refused it
            stages.append(found)
        nodes = [node for stage in traced for node in stage.nodes]
        if add is None:
            return cls(traced[0].conv.args[0], tuple(stages), None, False, tuple(nodes))
        (residual,) = (arg for arg in add.args if arg is not nodes[-1])
        return cls(traced[0].conv.args[0], tuple(stages), residual, adds_in_place(add), (*nodes, add))


def _way(chain: _GraphChain, folding: bool, always: bool) -> Way:
    """How a chain runs."""
    x, y, residual = _tensor(chain.x), _tensor(chain.nodes[-1]), _tensor(chain.residual)
    stages: Any = fx.map_arg(chain.stages, _tensor)
    given = [x, y, *sources_of(stages), *([] if residual is None else [residual])]
    if not all(isinstance(tensor, FakeTensor) for tensor in given):
        return Way.PLAIN
    # the operator's results are in channels_last, and what follows may depend on the layout
    if x.dim() != 4 or not y.is_contiguous(memory_format=torch.channels_last):
        return Way.PLAIN
    if residual is not None and residual.shape != y.shape:
        return Way.PLAIN
    # autocast may be a part of the graph
    dtype = _tensor(chain.nodes[0]).dtype
    casts = dtype.itemsize == 2 and any(
        tensor.dtype != dtype for tensor in (x, *(s.params.conv_weight for s in stages))
    )
    with torch.autocast(x.device.type, dtype) if casts else nullcontext():
        if folding and not any(stage.training for stage in stages) and all(tensor.is_cpu for tensor in given):
            return Way.FOLDED if fits(x, stages) else Way.PLAIN
        trains = y.requires_grad and any(stage.params.conv_weight.requires_grad for stage in stages)
        return compiled_way(x, stages, always=always, trains=trains)


def _conv(node: Any) -> Conv | None:
    """The convolution of a call of torch.conv2d, with nodes for tensors; None if no stage can have it."""
    return square_conv(*node.args[1:], **node.kwargs) if node.args else None


def _norm(node: Any) -> dict[str, Any]:
    """The arguments of a call of F.batch_norm behind its input, by their names."""
    _, *given = _NORM_ARGUMENTS.bind(*node.args, **node.kwargs).arguments.items()
    return dict(given)


def _tensor(node: Any) -> Any:
    """What a node gives, as Dynamo knows it."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _has_cpp_compiler() -> bool:
    """Whether inductor can compile for a CPU."""
    return any(shutil.which(name) for name in torch._inductor.config.cpp.cxx if name)
