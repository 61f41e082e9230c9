"""Measures chains of networks on the operator and on PyTorch, and fits the constants of `nasfast.fusion.rule` to them.

    python -m benchmarks.fit_rule [--models NAME ...] [--types fp32 bf16] [--threads N] [--rounds N] [--out FILE]

Every chain of the models runs at two sizes, and what trains are the BatchNorms with statistics of the batch or with
running ones, or nothing: where convolutions train, the rule leaves a chain to PyTorch. On one thread, times are CPU
times of the thread. The two variants of a chain run one after the other in every round. The fit minimises the relative
error of what a chain saves, of chains with the operator's own convolutions first, and then of the others. It prints the
constants in the order of `rule.Costs`, and for each kind of row what the rule loses: the time of what it chooses with
these constants and with those of the rule, of the better of both, and of the operator, all of PyTorch's time. `--out`
keeps the rows; with a file that has rows only the fit runs. It takes about five minutes of one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from benchmarks.bench_fuse_models import make
from benchmarks.harness import medians, positive, read_json, write_json
from nasfast.fusion import rule
from nasfast.fusion.find import find_chains
from nasfast.fusion.match import describe_stage, example_value, join
from nasfast.fusion.stages import plain_stages, run_stages
from nasfast.measure.timing import measure
from nasfast.ops.reference import ConvBNParams, Stage
from nasfast.runtime.memory import keep_freed_memory

MODELS = tuple(
    f"torchvision/{name}"
    for name in ("mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "regnet_y_400mf", "resnet18")
)
TRAINS = ("batch norms", "batch norms, running statistics", "nothing")
SIZES = ((8, 160), (1, 96))
# read before a chain runs, as its network would read and write other tensors
_OTHERS = torch.ones(2**21)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def chains(name: str, batch: int, resolution: int) -> Iterator[tuple[list[Stage], tuple[int, ...], bool]]:
    """Stages, shape of the input, and whether there is a residual, of every chain of a model."""
    model = make(name).eval().requires_grad_(False)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):

            def note(module: nn.Module, inputs: tuple[Tensor], _: Tensor, path: str = path) -> None:
                shapes[path] = (batch, *inputs[0].shape[1:])

            module.register_forward_hook(note)
    model(torch.zeros(1, 3, resolution, resolution))
    for found in find_chains(model).chains.values():
        for chain, top in found:
            if any(chain.widths):
                continue  # padded apart
            stages: Any = fx.map_arg(chain.stages, example_value)
            yield list(stages), shapes[join(top, chain.convolutions[0])], chain.residual is not None


def variant(run: Callable[[], Tensor], grad: Tensor, leaves: Sequence[Tensor]) -> Callable[[], dict[str, float]]:
    """A variant for `measure`: forward, and backward if there are leaves."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def step() -> dict[str, float]:
        _OTHERS.sum()
        start = clock()
        with torch.set_grad_enabled(bool(leaves)):
            y = run()
        if leaves:
            torch.autograd.grad(y, leaves, grad)
        return {"step": clock() - start}

    return step


def bench(
    stages: Sequence[Stage], shape: tuple[int, ...], residual: bool, trains: str, kind: str, rounds: int
) -> dict[str, Any]:
    """One row."""
    dtype = _DTYPES[kind]
    leaves: list[Tensor] = []
    exact = []
    for stage in stages:
        params = stage.params._replace(
            **{key: value.detach().clone() for key, value in stage.params._asdict().items() if value is not None}
        )
        params = params._replace(conv_weight=params.conv_weight.to(dtype, memory_format=torch.channels_last))
        if trains != "nothing":
            leaves += [params.bn_weight, params.bn_bias]
        exact.append(stage._replace(params=params, training=trains == "batch norms", momentum=0.1))
    unpadded = [None] * len(exact)
    x = torch.randn(shape).to(dtype, memory_format=torch.channels_last)
    if trains != "nothing" and shape[1] > 3:  # not the image
        leaves.append(x)
    with torch.no_grad():
        y = plain_stages(x, exact, unpadded)
    added, grad = torch.randn_like(y) if residual else None, torch.randn_like(y)
    for leaf in leaves:
        leaf.requires_grad_()
    checked: set[tuple] = set()

    def plain() -> Tensor:
        y = plain_stages(x, exact, unpadded)
        return y if added is None else y + added

    runs = {"eager": variant(plain, grad, leaves)}
    runs["nasfast"] = variant(lambda: run_stages(x, exact, unpadded, added, checked), grad, leaves)
    times = medians(measure(runs, rounds=rounds, warmup=1))
    settings = [(list(stage.params.conv_weight.shape), *stage[1:5]) for stage in stages]
    row = dict(trains=trains, type=kind, shape=shape, threads=torch.get_num_threads(), stages=settings)
    return {**row, "gradients": bool(leaves), "times": times}


def work(row: dict) -> list[float]:
    """What the chain of a row has of each kind of work, as the rule counts it now."""
    training = row["trains"] == "batch norms"
    stages = [
        Stage(ConvBNParams(torch.empty(shape, device="meta"), *[None] * 5), *settings, training)  # type: ignore[arg-type]
        for shape, *settings in row["stages"]
    ]
    batch, _, height, width = row["shape"]
    pixels = batch * height * width / row["threads"]
    _, *per_pixel, calls = rule.chain_work(stages, gradients=row["gradients"])
    return [*(pixels * amount for amount in per_pixel), calls]


def fit(rows: Sequence[dict]) -> np.ndarray:
    """The constants in ns, for which the relative error of what the chains save is least."""
    eager, ours = (np.array([1e6 * row["times"][name] for row in rows]) for name in ("eager", "nasfast"))
    works = np.array([work(row) for row in rows]) / eager[:, None]
    saved, costs, other = (eager - ours) / eager, np.zeros(works.shape[1]), rule.Costs._fields.index("other")
    rest = works[:, other] != 0
    for here, kinds in ((~rest, works[~rest].any(axis=0)), (rest, np.arange(len(costs)) == other)):
        unexplained = saved[here] - works[here] @ costs
        costs[kinds] = np.linalg.lstsq(works[here][:, kinds], unexplained, rcond=None)[0]
    return costs


def judge(rows: Sequence[dict], costs: Sequence[float]) -> str:
    """What the rule chooses with these constants, of PyTorch's time over all rows and in the worst one."""
    eager, ours = (np.array([row["times"][name] for row in rows]) for name in ("eager", "nasfast"))
    chosen = np.where(np.array([work(row) for row in rows]) @ costs > 0, ours, eager)
    best, worst = np.minimum(eager, ours), (chosen / eager).max()
    total = eager.sum()
    return (
        f"{chosen.sum() / total:.3f} of eager, at most {worst:.2f}; best {best.sum() / total:.3f}, "
        f"always fused {ours.sum() / total:.3f}; {len(rows)} rows"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="as in bench_fuse_models")
    parser.add_argument("--types", nargs="+", choices=_DTYPES, default=["fp32"])
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=TRAINS)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    rows: list[dict] = read_json(args.out) if args.out and args.out.exists() else []
    if not rows:
        for kind in args.types:
            for trains in args.trains:
                known = set()
                for name in args.models:
                    for size in SIZES:
                        for stages, shape, residual in chains(name, *size):
                            key = (*map(describe_stage, stages), shape, residual)
                            if key not in known:
                                known.add(key)
                                rows.append(bench(stages, shape, residual, trains, kind, args.rounds))
        if args.out:
            write_json(args.out, rows)
    for kind in sorted({row["type"] for row in rows}):
        of_type = [row for row in rows if row["type"] == kind]
        fitted = rule.Costs(*(float(f"{cost:.3g}") for cost in fit(of_type)))
        for name, costs in ("fit", fitted), ("rule", rule.COSTS[_DTYPES[kind]]):
            print(f"{kind}, {name}: {costs}")
            for trains in TRAINS:
                if here := [row for row in of_type if row["trains"] == trains]:
                    print(f"  {trains:32} {judge(here, costs)}")


if __name__ == "__main__":
    main()
