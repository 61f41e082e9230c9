"""A step of DARTS on a network of cells against a straightforward PyTorch implementation.

    python -m benchmarks.bench_cells [--rounds 5] [--threads N] [--cells 8] [--batch 64] [--out FILE]

softmax(a) mixes all operations of an edge of the cell with four nodes; images are 32 x 32. A step is one forward and
backward pass for weights and logits, and their optimisers. Peers compute the eight operations of each edge one by one,
contiguous and channels_last, with equal weights. `difference` is the largest difference between the logits' gradients
of nasfast and of the peer, relative to the largest gradient.

Memory is the bytes that one forward pass keeps for backward: those of the step, and those of each method on spaces
whose edges have 2, 4 and 8 operations; those of ProxylessNAS include the nodes, on which it measures operations that do
not run. Methods that sample one operation must need the same memory on all of these spaces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import positive, ratios, saved_bytes, timed, write_json
from nasfast.measure.timing import measure, measuring
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.gates import draw_once, logits_gradient, uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.search import CellSearch, CellSearchEngine
from nasfast.research.cells.space import DARTS_OPS, CellSpace, darts_cell, darts_space


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, affine=False)


def _separable(channels: int, kernel: int, dilation: int, times: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(times):
        parts += [
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, 1, dilation * (kernel // 2), dilation, groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1, bias=False),
            _norm(channels),
        ]
    return nn.Sequential(*parts)


class _MixedOp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.ops = nn.ModuleList(
            [
                nn.Identity(),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _norm(channels)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), _norm(channels)),
                _separable(channels, 3, 1, 2),
                _separable(channels, 3, 2, 1),
                _separable(channels, 5, 2, 1),
                _separable(channels, 5, 1, 2),
            ]
        )

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        # the first weight belongs to the operation none
        return sum(w * op(x) for w, op in zip(weights[1:], self.ops, strict=True))


class _PlainCell(nn.Module):
    def __init__(self, before: tuple[int, int], channels: int, nodes: int = 4) -> None:
        super().__init__()
        self.nodes = nodes
        self.pre = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(c, channels, 1, bias=False), _norm(channels)) for c in before
        )
        self.edges = nn.ModuleList(_MixedOp(channels) for node in range(nodes) for _ in range(2 + node))

    def forward(self, inputs: list[Tensor], weights: Tensor) -> Tensor:
        states = [pre(x) for pre, x in zip(self.pre, inputs, strict=True)]
        first = 0
        for _ in range(self.nodes):
            states.append(sum(self.edges[first + i](x, weights[first + i]) for i, x in enumerate(states)))
            first += len(states) - 1
        return torch.cat(states[2:], 1)


class PlainDarts(nn.Module):
    """The S8n network in plain modules."""

    def __init__(self, cells: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 3 * channels, 3, 1, 1, bias=False), nn.BatchNorm2d(3 * channels, track_running_stats=False)
        )
        widths = [3 * channels, 3 * channels, *[4 * channels] * cells]
        self.cells = nn.ModuleList(_PlainCell((widths[i], widths[i + 1]), channels) for i in range(cells))
        self.classifier = nn.Linear(4 * channels, 10, bias=False)

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        weights, inputs = torch.softmax(alpha, -1), [self.stem(x)] * 2
        for cell in self.cells:
            inputs = [inputs[1], cell(inputs, weights)]
        return self.classifier(inputs[1].mean((2, 3)))


def plain_copy(search: CellSearch, layout: torch.memory_format) -> PlainDarts:
    """The plain network with the weights of a search; both list them in the same order."""
    plain = PlainDarts(search.space.cells, search.space.channels)
    with torch.no_grad():
        for copy, weight in zip(plain.parameters(), search.net.parameters(), strict=True):
            assert copy.shape == weight.shape
            copy.copy_(weight)
    return plain.to(memory_format=layout)


def training_step(model: nn.Module, forward_backward: Callable[[], None]) -> Callable[[], dict[str, float]]:
    """A step that ends with clipping and SGD."""
    weights = list(model.parameters())
    sgd = torch.optim.SGD(weights, lr=0.025, momentum=0.9, weight_decay=3e-4)

    def step() -> None:
        sgd.zero_grad()
        forward_backward()
        nn.utils.clip_grad_norm_(weights, 5.0)
        sgd.step()

    return timed(step)


def plain_step(model: nn.Module, alpha: Tensor, x: Tensor, y: Tensor) -> Callable[[], dict[str, float]]:
    """Make the peer's step."""
    adam = torch.optim.Adam([alpha], lr=3e-4, betas=(0.5, 0.999), weight_decay=1e-3)

    def forward_backward() -> None:
        adam.zero_grad()
        F.cross_entropy(model(x, alpha), y).backward()
        adam.step()

    return training_step(model, forward_backward)


def our_step(search: CellSearch, x: Tensor, y: Tensor) -> Callable[[], dict[str, float]]:
    """Make the step of `nasfast.research.cells.search.search_cells`, with everything that it records."""
    # a search on one set of images does not look at the optimiser
    engine = CellSearchEngine(search, torch.optim.SGD(search.net.parameters()), None)

    def forward_backward() -> None:
        search.done.zero_()  # writes the same record at every step
        engine.forward_backward(x, y)

    return training_step(search.net, forward_backward)


def difference(search: CellSearch, plain: PlainDarts, x: Tensor, y: Tensor) -> float:
    """Largest difference between the logits' gradients, relative to the largest gradient."""
    alpha = search.alpha[0].float().requires_grad_()
    (peer,) = torch.autograd.grad(F.cross_entropy(plain(x, alpha), y), alpha)
    draw = draw_once(search.cfg, search.logits, torch.Generator(), 0.0)
    gates = search.spread(draw.gates)
    (cost,) = torch.autograd.grad(F.cross_entropy(search.net(x, gates, draw.runs), y), gates)
    ours = logits_gradient(search.cfg, draw, search.collect(cost))[0]
    return float((ours - peer).abs().max() / peer.abs().max())


def make_search(args: argparse.Namespace) -> tuple[CellSearch, Tensor, Tensor]:
    """A search of DARTS, and a batch."""
    torch.manual_seed(0)
    space = darts_space(cells=args.cells, channels=args.channels, reductions=False)
    search = CellSearch(space, CellSearchConfig(method="darts", records=1), steps=10**6)
    x, y = torch.randn(args.batch, 3, 32, 32), torch.randint(10, (args.batch,))
    return search.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last), y


def step_row(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time of a step."""
    ours, x, y = make_search(args)
    variants = {"nasfast": our_step(ours, x, y)}
    for name, layout in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
        alpha = ours.alpha[0].float().clone().requires_grad_()
        variants[name] = plain_step(plain_copy(ours, layout), alpha, x.contiguous(memory_format=layout), y)
    gradient_difference = difference(ours, plain_copy(ours, torch.channels_last), x, y)
    times = measure(variants, rounds=args.rounds, warmup=1)
    return {
        "name": "one level",
        "cells": args.cells,
        "channels": args.channels,
        "batch": args.batch,
        "times": times,
        "difference": gradient_difference,
        "ratio": {phase: ratios(times, "nasfast", phase) for phase in ("step", "cpu")},
    }


_OPERATIONS = {
    2: ("sep_conv_3x3", "sep_conv_5x5"),
    4: ("sep_conv_3x3", "dil_conv_3x3", "dil_conv_5x5", "sep_conv_5x5"),
    8: DARTS_OPS,
}


def memory(args: argparse.Namespace, method: str, ops: tuple[str, ...]) -> int:
    """Bytes that a method keeps for backward if edges have these operations."""
    space = CellSpace(name="memory", cell=darts_cell(ops), cells=args.cells, channels=args.channels, resolution=32)
    net = CellSupernet(space).to(memory_format=torch.channels_last)
    logits = uniform_logits(space)
    # the same operation is sampled everywhere, so that only the number of operations differs
    logits[..., space.ops.index("sep_conv_5x5")] += 0 if method == "darts" else 100
    draw = draw_once(CellSearchConfig(method=method), logits, torch.Generator().manual_seed(0), 0.0)
    gates = draw.gates.expand(args.cells, -1, -1).float().requires_grad_()
    x = torch.randn(args.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def forward(x: Tensor) -> list[Tensor]:
        nodes: list[list[Tensor]] = []
        logits = net(x, gates, draw.runs, nodes=nodes)
        # operations that do not run are measured on the nodes after backward; a square keeps its node and nothing else
        return [logits, *(node.square() for cell in nodes if draw.measures.any() for node in cell)]

    return saved_bytes(forward, [x], exclude=net.parameters())


def memory_of_step(args: argparse.Namespace) -> dict[str, int]:
    """Bytes that the network of the step keeps for backward, in nasfast and in the peer."""
    search, x, _ = make_search(args)
    plain = plain_copy(search, torch.channels_last)
    draw = draw_once(search.cfg, search.logits, torch.Generator(), 0.0)
    gates, alpha = search.spread(draw.gates), search.alpha[0].float().requires_grad_()
    return {
        "nasfast": saved_bytes(lambda x: search.net(x, gates, draw.runs), [x], exclude=search.net.parameters()),
        "channels_last": saved_bytes(lambda x: plain(x, alpha), [x], exclude=plain.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--cells", type=positive, default=8)
    parser.add_argument("--channels", type=positive, default=16)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of printing it")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.cells, args.channels, args.batch = 1, 1, 4, 8
    with measuring(args.threads):
        rows = [step_row(args), {"name": "memory, step", "bytes": memory_of_step(args)}]
        for method in ("darts", "dsnas", "proxyless"):
            by_operations = {count: memory(args, method, ops) for count, ops in _OPERATIONS.items()}
            rows.append({"name": f"memory, {method}", "bytes_by_operations": by_operations})
    if args.out:
        write_json(args.out, rows)
    else:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
