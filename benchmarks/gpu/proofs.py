"""Proves the CUDA kernels at the sizes of a real step: against float64, and bit for bit against themselves."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from typing import TYPE_CHECKING, Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.captures import begun_by_launches
from nasfast import ops
from nasfast.ops import ConvBNParams, Stage, cuda_times, reference
from nasfast.ops import plan as planning
from nasfast.ops.cuda_times import Chain, Schedule
from nasfast.spaces import Arch

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Bench

# the largest relative error of one rounding
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12}
# By how much an error may be larger than that of eager autocast, and in roundings besides: dz, dy and the result of
# every stage are rounded. Near a kink of an activation, roundings choose the slope of an element, and of millions of
# elements about as many on either side.
MOST, ROUNDINGS = 1.25, 4
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
    for (kind, kernel, stride), inputs, outputs in zip(
        chain.stages, chain.channels[:-1], chain.channels[1:], strict=True
    ):
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
    images, failed, done = 8 if bench.on_gpu else 2, [], 0  # float64 is slow, and few images have every size of a layer
    fewer = cuda_times.BATCH // images
    real = [chain._replace(pixels=chain.pixels // fewer) for chain in cuda_times.TIMES["H200"]]
    chains = real if bench.on_gpu else list(_SMALL)
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
    again = [kind for kind, *_ in chain.stages[:2]] == ["pointwise", "depthwise"] and chain.channels[0] <= 64
    schedules = get_args(Schedule) if again else ("stored",)
    return all([_compare_in(bench, chain, images, dtype, schedules) for dtype in ROUNDING])


def _compare_in(bench: Bench, chain: Chain, images: int, dtype: torch.dtype, schedules: Sequence[Schedule]) -> bool:
    x, stages = draw(chain, images, bench.device)
    x = x.to(dtype)
    # Weights as autocast rounds them: their rounding is an error of nobody. It is as large as all others together, and
    # may cancel one of them.
    stages = [s._replace(params=s.params._replace(conv_weight=s.params.conv_weight.to(dtype).float())) for s in stages]

    def eager(x: Tensor, stages: list[Stage]) -> Tensor:
        with torch.autocast(bench.device, dtype):
            return reference.conv_bn_act_chain(x, stages)

    def kernels(x: Tensor, stages: list[Stage]) -> Tensor:
        with torch.autocast(bench.device, dtype):
            return ops.conv_bn_act_chain(x, stages, backend="cuda")

    y = results(eager, x, stages, None, wide=False)["y"]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x)
    grad = grad.contiguous(memory_format=torch.channels_last)
    want = results(reference.conv_bn_act_chain, x, stages, grad, wide=True)
    theirs, well = errors_of(results(eager, x, stages, grad, wide=False), want), True
    for schedule in schedules:
        with scheduled(schedule):
            ours = errors_of(results(kernels, x, stages, grad, wide=False), want)
        good = all(error <= MOST * theirs[name] + ROUNDINGS * ROUNDING[dtype] for name, error in ours.items())
        row = {"chain": str(chain), "dtype": str(dtype)[6:], "schedule": schedule, "ok": good}
        bench.row("parity", **row, ours=ours, eager=theirs)
        well &= good
    return well


# ---- bits


def bench_bits(bench: Bench) -> None:
    """Run the same random paths in several ways, which must all give the same bits of loss and gradients.

    Raises:
        SystemExit: they do not.
    """
    from benchmarks.gpu.parts import Variant, random_paths

    paths = random_paths(bench, 300 if bench.on_gpu else 2)
    engine, late, eager = (
        Variant("nasfast", "engine"),
        Variant("nasfast", "engine", early=False),
        Variant("nasfast", "eager"),
    )
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
    from benchmarks.gpu.parts import engine_of, on_cuda_kernels

    found, start = [], time.monotonic()
    with on_cuda_kernels(bench, variant):
        net, engine, images, labels = engine_of(bench, variant)
        for path in paths:
            loss = engine.forward_backward(images, labels, [path]).loss
            gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
            found.append(torch.cat([loss.flatten(), *gradients]).cpu())
            if time.monotonic() - start > seconds:
                break
    del net, engine
    gc.collect()
    return found
