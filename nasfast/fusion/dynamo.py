"""What is compiled: graphs of TorchDynamo in which chains run on our operators, and the rest on another backend.

TorchDynamo gives graphs of PyTorch's functions, before autograd. All that a forward decided in Python is guarded, and
parameters and buffers are inputs of the graph, so nothing is kept here that could go stale. A chain becomes one node,
a `ChainCall`, which decides by the size of its input. `compile_graph` is the backend "nasfast" of torch.compile, and
`region` compiles the modules of a fused model with the same function.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from nasfast.fusion import rule
from nasfast.fusion.excite import ExcitationCall, TracedExcitation, find_excitations
from nasfast.fusion.match import FusedChain, GraphChain, Matcher, Widths, module_path
from nasfast.fusion.nodes import example_value
from nasfast.fusion.shapes import sizes_of
from nasfast.fusion.stages import plain_stages, run_stages
from nasfast.ops.autograd import transformed
from nasfast.ops.reference import ConvBNParams, Stage
from nasfast.ops.tensors import storage_dtype

log = logging.getLogger(__name__)
# the parameters of a stage without tensors
_NONE = ConvBNParams(*[None] * len(ConvBNParams._fields))  # type: ignore[arg-type]
# methods whose result depends on the layout of their input
_LAYOUT_METHODS = ("view", "stride", "as_strided", "is_contiguous")


class Saved(NamedTuple):
    """What one operator of a graph saves.

    Attributes:
        chain: the chain that it runs; None if it is a squeeze-and-excitation.
        function: of the shape of its input, in ns, as `rule.Saving`.
        sizes: of its input, as expressions of symbols where they are not known.
    """

    chain: FusedChain | None
    function: Callable[[torch.Size], float]
    sizes: Sequence[int | sympy.Expr]


@dataclass
class GraphFacts:
    """What was found in a graph.

    Attributes:
        chains: every chain, also those that are left to PyTorch.
        reasons: why the convolution that is called by the module at this path is in no chain.
        excitations: paths of the squeeze-and-excitations.
        replaced: the number of chains that became calls of the operator.
        savings: of each call of an operator.
    """

    chains: list[FusedChain] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    excitations: list[str] = field(default_factory=list)
    replaced: int = 0
    savings: list[Saved] = field(default_factory=list)


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
        options: `inner` is the backend for what is left, a name or a function; by default "inductor", and "eager" where
            there is no C++ compiler. `only_faster` is as in `nasfast.fuse`.
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
    inner = settings["inner"]
    if not inner:
        can_compile = any(shutil.which(name) for name in torch._inductor.config.cpp.cxx if name)
        inner = "inductor" if can_compile else "eager"
    facts = fuse_graph(graph_module, always=not settings["only_faster"], keep_layouts=True)
    log.info("%s of %s chains on the operator; the rest is for %s", facts.replaced, len(facts.chains), inner)
    return torch._dynamo.lookup_backend(inner)(graph_module, list(example_inputs))


def fuse_graph(graph_module: fx.GraphModule, *, always: bool, keep_layouts: bool) -> GraphFacts:
    """Replace the chains and squeeze-and-excitations in a graph of TorchDynamo by single nodes.

    Args:
        graph_module: its nodes have their results as fake tensors in `meta`.
        always: whether every chain runs on the operator, and not only where the rule expects a gain.
        keep_layouts: whether a chain is left alone if PyTorch's result is not in channels_last, as the operator's is.
    """
    graph = graph_module.graph
    facts = GraphFacts()
    if transformed() or any("functorch" in str(getattr(node.target, "__module__", "")) for node in graph.nodes):
        return facts
    matcher = Matcher(graph)
    chains = list(matcher.chains())
    facts.reasons = {module_path(conv): reason for conv, reason in matcher.reasons.items()}
    groups: list[GraphChain | TracedExcitation] = [*chains, *find_excitations(graph, matcher.effects)]
    reads_layouts = any(node.op == "call_method" and node.target in _LAYOUT_METHODS for node in graph.nodes)
    # what reads a result is replaced before what gives it, and then finds it there
    for group in sorted(groups, key=lambda group: matcher.effects.order[group.nodes[-1]], reverse=True):
        if isinstance(group, GraphChain):
            _replace_chain(graph_module, group, facts, always, keep_layouts, reads_layouts)
        else:
            facts.excitations.append(module_path(group.nodes[-1]))
            trains = any(example_value(weight).requires_grad for weight in group.weights)
            replacement = ExcitationCall(group.act, group.gate, trains)
            x = example_value(group.x)
            facts.savings.append(Saved(None, replacement.saving_function(x), sizes_of(x)))
            _replace(graph_module, group.nodes, replacement, (group.x, *group.weights))
    facts.chains.reverse()
    facts.excitations.reverse()
    graph.lint()
    graph_module.recompile()
    return facts


def _replace_chain(
    graph_module: fx.GraphModule,
    chain: GraphChain,
    facts: GraphFacts,
    always: bool,
    keep_layouts: bool,
    reads_layouts: bool,
) -> None:
    """Add the chain to the facts, and put a call in its place if it is not left to PyTorch.

    Args:
        always, keep_layouts: as in `fuse_graph`.
        reads_layouts: whether something in the graph depends on the layout of its input.
    """
    call = _chain_call(chain, always=always, keep_layouts=keep_layouts)
    runs = call if isinstance(call, str) else describe_runs(call.saving, example_value(chain.x))
    facts.chains.append(chain.describe(runs))
    if isinstance(call, str):
        return
    channels = example_value(chain.nodes[-1]).stride(1)
    # sizes may be symbols, on which nothing is decided
    call.contiguous = reads_layouts and not (isinstance(channels, int) and channels == 1)
    tensors = [tensor for stage in chain.stages for tensor in stage.params]
    # a number that has changed before is a node, and NumPy's floats are tensors
    numbers = tuple((s.momentum, s.eps, widths) for s, widths in zip(chain.stages, chain.widths, strict=True))
    graph = graph_module.graph
    with graph.inserting_before(chain.nodes[-1]):
        numbers = fx.map_arg(
            numbers,
            lambda node: graph.call_function(float, (node,)) if isinstance(example_value(node), Tensor) else node,
        )
    for node in chain.sizes():
        node.replace_input_with(node.all_input_nodes[0], chain.x)
    _replace(graph_module, chain.nodes, call, (chain.x, chain.residual, numbers, *tensors))
    facts.replaced += 1
    facts.savings.append(Saved(facts.chains[-1], call.saving, sizes_of(example_value(chain.x))))


def _replace(graph_module: fx.GraphModule, nodes: Sequence[fx.Node], call: nn.Module, arguments: tuple) -> None:
    """Put a call of a module in the place of these nodes."""
    graph, last = graph_module.graph, nodes[-1]
    name = f"nasfast_{last.name}"
    graph_module.add_submodule(name, call)
    with graph.inserting_before(last):
        fused = graph.call_module(name, arguments)
    fused.meta = dict(last.meta)
    last.replace_all_uses_with(fused)
    for node in reversed(nodes):
        graph.erase_node(node)


class ChainCall(nn.Module):
    """A chain on the operator where that pays; its BatchNorms do not count the batch, which the graph does.

    Args:
        settings: its stages, of which tensors and numbers of BatchNorms are given at each call.
        in_place: whether the addition behind it keeps the type of its result.
        saving: what the operator is expected to save.

    Attributes:
        contiguous: whether what follows needs a result that is contiguous, as PyTorch's is.
    """

    def __init__(self, settings: Sequence[Stage], in_place: bool, saving: rule.Saving) -> None:
        super().__init__()
        self._settings, self._in_place = [stage[1:6] for stage in settings], in_place
        self.saving, self.contiguous = saving, False
        self._checked: set[tuple] = set()

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        numbers: Sequence[tuple[float, float, Widths | None]],
        *tensors: Tensor | None,
    ) -> Tensor:
        """The result of the chain for (N, C, H, W).

        Args:
            x, residual: its input, and what is added to its result.
            numbers: momentum, eps and widths of each stage.
            tensors: those of its stages, as in `ConvBNParams`.
        """
        momentums, epses, widths = zip(*numbers, strict=True)
        if torch.compiler.is_compiling() and any([type(length) is not int for length in x.shape]):
            # the sizes are decided on; a plan has numbers
            x = x.view([int(length) for length in x.shape])
            widths = tuple(None if its is None else tuple(map(int, its)) for its in widths)
        each = len(_NONE)
        params = [ConvBNParams(*tensors[i : i + each]) for i in range(0, len(tensors), each)]  # type: ignore[arg-type]
        each_stage = zip(params, self._settings, momentums, epses, strict=True)
        stages = [Stage(p, *fixed, momentum, eps) for p, fixed, momentum, eps in each_stage]
        if self.saving(x.shape) < 0:
            y = plain_stages(x, stages, widths)
            if residual is not None:
                y = y.add_(residual) if self._in_place else y + residual
            return y
        y = run_stages(x, stages, widths, residual, self._checked)
        if self._in_place:
            y = y.to(storage_dtype(x))
        return y.contiguous() if self.contiguous else y


def _chain_call(chain: GraphChain, *, always: bool, keep_layouts: bool) -> ChainCall | str:
    """The call of the chain; or why it is left to PyTorch."""
    x, y = example_value(chain.x), example_value(chain.nodes[-1])
    stages: Any = fx.map_arg(chain.stages, example_value)
    tensors = [tensor for stage in stages for tensor in stage.params if tensor is not None]
    if not all(isinstance(tensor, FakeTensor) for tensor in (x, y, *tensors)) or x.dim() != 4:
        return "on PyTorch: not all of its tensors are ordinary ones with 4 dimensions"
    if keep_layouts and not y.is_contiguous(memory_format=torch.channels_last):
        return "on PyTorch: its result is not in channels_last"
    if keep_layouts and any(isinstance(number, Tensor) for stage in stages for number in (stage.momentum, stage.eps)):
        return "on PyTorch: a number of a BatchNorm is NumPy's"
    # autocast may be a part of the graph
    conv = example_value(chain.first)
    casts = conv.dtype.itemsize == 2 and any(
        tensor.dtype != conv.dtype for tensor in (x, *(s.params.conv_weight for s in stages))
    )
    with torch.autocast(x.device.type, conv.dtype) if casts else nullcontext():
        trains = y.requires_grad and any(stage.params.conv_weight.requires_grad for stage in stages)
        saving = rule.ALWAYS if always else rule.expected_saving(x, stages, trains=trains, gradients=y.requires_grad)
    return describe_runs(None, conv, trains) if saving is None else ChainCall(chain.stages, chain.in_place, saving)


def describe_runs(saving: rule.Saving | None, x: Tensor, trains: bool = False) -> str:
    """In words when a chain runs on the operator.

    Args:
        saving: what the rule expects of inputs like x.
        x: its type and device count.
        trains: whether a convolution of the chain trains.
    """
    if saving is None:
        where = f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}{' while convolutions train' * trains}"
        return f"on PyTorch: the operator is not faster in {where}"
    least = saving.least
    return f"fused where the convolutions give {least:,} numbers or more per thread" if least else "fused"
