"""Proves the CUDA kernels at the sizes of a real step: against float64, and bit for bit against themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from typing import TYPE_CHECKING, Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from nasfast import ops
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.measure.timing import random_batch
from nasfast.ops import ConvBNParams, Stage, cuda_times, reference
from nasfast.ops import plan as planning
from nasfast.ops.cuda_times import Chain, Schedule
from nasfast.ops.destinations import Offer
from nasfast.spaces import Arch

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Bench

# the largest relative error of one rounding
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12}
# By how much an error may be larger than that of eager autocast. Both round every stage; near a kink of an activation,
# roundings choose the slope of an element, and of millions of elements about as many on either side.
MOST = 1.25
# chains of a dry run: with a stem, and with an expansion that can be computed again
_SMALL = (
    Chain((("dense", 3, 2), ("depthwise", 3, 1), ("pointwise", 1, 1)), 2 * 8 * 8, (3, 8, 8, 8)),
    Chain((("pointwise", 1, 1), ("depthwise", 5, 1), ("pointwise", 1, 1)), 2 * 7 * 7, (8, 24, 24, 8)),
)


@contextmanager
def scheduled(schedule: Schedule) -> Iterator[None]:
    """Within this context, the CUDA kernels run expansions in this schedule, if they have it for the chain."""
    planning._decide_once.cache_clear()
    with (
        patch.object(cuda_times, "schedule", lambda gpu, chain: schedule),
        patch.object(planning, "modelled_gpu", lambda x: "H200"),
    ):
        yield
    planning._decide_once.cache_clear()


def draw(chain: Chain, images: int, device: str) -> tuple[Tensor, list[Stage]]:
    """An input in float32 and the stages of a chain."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    width = isqrt(chain.pixels // images)
    x = (normal(images, chain.channels[0], width, width) + 0.5).contiguous(memory_format=torch.channels_last)
    stages, before = [], ""
    for (kind, kernel, stride), inputs, outputs in zip(chain.stages, chain.channels[:-1], chain.channels[1:], strict=True):
        groups = inputs if kind == "depthwise" else 1
        weight = normal(outputs, inputs // groups, kernel, kernel) / (inputs // groups * kernel**2) ** 0.5
        act = "identity" if (before, kind) == ("depthwise", "pointwise") else "relu6"
        params = ConvBNParams(weight, 1 + 0.5 * normal(outputs), normal(outputs), None, None)
        stages.append(Stage(params, stride, kernel // 2, groups, act, True, 0.1, 1e-5))
        before = kind
    return x, stages


def results(function: Any, x: Tensor, stages: Sequence[Stage], grad: Tensor | None, *, wide: bool) -> dict[str, Tensor]:
    """The result of a chain and all gradients; dx only behind a pointwise first stage. wide: in float64."""
    def number(t: Tensor) -> Tensor:
        return t.double() if wide else t

    first = number(x).detach().requires_grad_(stages[0].params.conv_weight.shape[2] == 1)
    leaves = {"dx": first} if first.requires_grad else {}
    own = []
    for i, stage in enumerate(stages):
        weight, gamma, beta = stage.params[0], *(number(t).detach().clone().requires_grad_() for t in stage.params[1:3])
        leaves |= {f"dgamma{i}": gamma, f"dbeta{i}": beta}
        own.append(stage._replace(params=ConvBNParams(number(weight), gamma, beta, None, None)))
    y = function(first, own)
    y.backward(torch.ones_like(y) if grad is None else grad.to(y.dtype))
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def errors_of(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Norm of each error over that of the truth; infinite where something is not a number."""
    found = {}
    for name, exact in want.items():
        error = float((got[name].double() - exact).norm() / exact.norm().clamp_min(1e-30))
        found[name] = error if error == error else float("inf")
    return found


def bench_parity(bench: Bench) -> None:
    """Compare every chain of a step, in both types and in every schedule, with float64 and with eager autocast.

    Raises:
        SystemExit: an error is larger than it may be.
    """
    chains = list(cuda_times.TIMES["H200"]) if bench.on_gpu else list(_SMALL)
    images, failed, done = cuda_times.BATCH if bench.on_gpu else 2, [], 0
    for chain in chains:
        if bench.left < 3:
            bench.row("left_out", what="parity", error=f"{len(chains) - done} chains: no time")
            break
        with bench.attempt(str(chain)):
            failed += [str(chain)] * (not _compare(bench, chain, images))
            done += 1
    if failed or not done:
        raise SystemExit(f"errors are too large in {len(failed)} chains: {'; '.join(failed)}")


def _compare(bench: Bench, chain: Chain, images: int) -> bool:
    x, stages = draw(chain, images, bench.device)
    again = [kind for kind, *_ in chain.stages[:2]] == ["pointwise", "depthwise"] and chain.channels[0] <= 64
    well = True
    for dtype in ROUNDING:
        x = x.to(dtype)

        def rounded(function: Any, dtype: torch.dtype = dtype) -> Any:
            def run(x: Tensor, stages: list[Stage]) -> Tensor:
                with torch.autocast(bench.device, dtype):
                    return function(x, stages)

            return run

        probe = results(rounded(reference.conv_bn_act_chain), x, stages, None, wide=False)["y"]
        grad = torch.randn(probe.shape, generator=torch.Generator().manual_seed(1)).to(x).contiguous(
            memory_format=torch.channels_last
        )
        want = results(reference.conv_bn_act_chain, x, stages, grad, wide=True)
        eager = errors_of(results(rounded(reference.conv_bn_act_chain), x, stages, grad, wide=False), want)
        for schedule in get_args(Schedule) if again else ("stored",):
            with scheduled(schedule):
                kernels = rounded(lambda x, stages: ops.conv_bn_act_chain(x, stages, backend="cuda"))
                ours = errors_of(results(kernels, x, stages, grad, wide=False), want)
            good = all(error <= MOST * eager[name] + ROUNDING[dtype] for name, error in ours.items())
            bench.row(
                "parity",
                chain=str(chain),
                dtype=str(dtype)[6:],
                schedule=schedule,
                ok=good,
                ours=ours,
                eager=eager,
            )
            well &= good
        del want
    return well


# ---- bits


@contextmanager
def begun_by_launches() -> Iterator[None]:
    """No chain begins the backward of the chain before: a launch does, whose bits are those of the eager engine."""
    with patch.object(Offer, "begin_backward", lambda self, dx: None):
        yield


def bench_bits(bench: Bench) -> None:
    """Run the same random paths in several ways, which must all give the same bits of loss and gradients.

    Raises:
        SystemExit: they do not.
    """
    from benchmarks.gpu.parts import Variant, random_paths

    paths = random_paths(bench, 300 if bench.on_gpu else 2)
    engine, late, eager = Variant("nasfast", "engine"), Variant("nasfast", "engine", early=False), Variant("nasfast", "eager")
    share = bench.left / 7
    first = bits_of(bench, engine, paths, seconds=share)
    paths = paths[: len(first)]
    others = {
        "again": bits_of(bench, engine, paths),
        "no early launches": bits_of(bench, late, paths),
    }
    with begun_by_launches():
        apart = bits_of(bench, engine, paths)
        others["eager"] = bits_of(bench, eager, paths)
    wrong = []
    for name, found in others.items():
        expected = apart if name == "eager" else first
        different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
        bench.row("bits", what=name, paths=len(paths), different=len(different), first=different[:5])
        wrong += [f"{name}: {len(different)} of {len(paths)} paths"] * bool(different)
    if wrong or not paths:
        raise SystemExit(f"bits differ: {'; '.join(wrong) or 'no path ran'}")


def bits_of(bench: Bench, variant: Any, paths: Sequence[Arch], *, seconds: float = float("inf")) -> list[Tensor]:
    """Loss and gradients of each path, on the CPU; as many paths as these seconds allow.

    Raises:
        NoCudaKernel: no CUDA kernel of a chain ran.
    """
    import time

    from benchmarks.captures import EagerCapture
    from benchmarks.gpu.launches import noted_chains
    from benchmarks.gpu.parts import NoCudaKernel, network

    found, start = [], time.monotonic()
    with variant.chosen(bench), noted_chains() as chains:
        net = network(bench, variant)
        images, labels = random_batch(bench.space, bench.batch, device=bench.device)
        if variant.how == "engine":
            capture = None if bench.on_gpu else EagerCapture()
            engine = GraphEngine(net, tuple(images.shape), bf16=True, capture=capture)
        else:
            engine = EagerEngine(net, bf16=True)
        for path in paths:
            loss = engine.forward_backward(images, labels, [path]).loss
            gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
            found.append(torch.cat([loss.flatten(), *gradients]).cpu())
            if time.monotonic() - start > seconds:
                break
    del engine, net
    gc.collect()
    if not chains:
        raise NoCudaKernel(f"{variant.name}: no CUDA kernel of a chain ran")
    return found
