"""Proves the CUDA kernels at the sizes of a real step: against float64, and bit for bit against themselves."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.captures import reduced_by_launches
from benchmarks.gpu.bench import ENGINE, Bench, Variant, make_engine, on_cuda_kernels, random_paths
from nasfast import ops
from nasfast.ops import ConvBNParams, Stage, reference
from nasfast.spaces import Arch, SearchSpace
from nasfast.supernet import StandaloneNetwork

# the largest relative error of one rounding
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12}
# By how much an error may be larger than that of eager autocast, and in roundings besides: dz, dy and the result of
# every stage are rounded. Near a kink of an activation, roundings choose the slope of an element, and of millions of
# elements about as many on either side.
MOST, ROUNDINGS = 1.25, 4


class Chain(NamedTuple):
    """The shape of a chain.

    Attributes:
        stages: what kind of convolution each stage has, and its kernel and stride.
        pixels: of the chain's input, of all images.
        channels: of the input, and of the output of each stage.
    """

    stages: tuple[tuple[str, int, int], ...]
    pixels: int
    channels: tuple[int, ...]

    def __str__(self) -> str:
        parts = []
        for (kind, kernel, stride), before, after in zip(
            self.stages, self.channels[:-1], self.channels[1:], strict=True
        ):
            size = f" {kernel}x{kernel}" if kernel > 1 else ""
            parts.append(f"{kind}{size}{f' stride {stride}' if stride > 1 else ''} {before}-{after}")
        return f"{', '.join(parts)} on {self.pixels} pixels"


# chains of a dry run: with a stem, and with an expansion
_SMALL = (
    Chain((("dense", 3, 2), ("depthwise", 3, 1), ("pointwise", 1, 1)), 2 * 8 * 8, (3, 8, 8, 8)),
    Chain((("pointwise", 1, 1), ("depthwise", 5, 1), ("pointwise", 1, 1)), 2 * 7 * 7, (8, 24, 24, 8)),
)


def distinct_chains(space: SearchSpace, path: Arch, images: int) -> list[Chain]:
    """The different chains of a path: each ends behind a pointwise convolution that reads a depthwise one."""
    net = StandaloneNetwork(space, path).to("meta").train()
    convs: list[tuple[str, nn.Conv2d, int]] = []

    def note(conv: nn.Conv2d, inputs: tuple[Tensor, ...]) -> None:
        kind = "depthwise" if conv.groups > 1 else "pointwise" if conv.kernel_size == (1, 1) else "dense"
        convs.append((kind, conv, inputs[0].numel() // conv.in_channels))

    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(note)
    net(torch.empty(images, space.in_channels, space.resolution, space.resolution, device="meta"))
    ends = [i for i in range(1, len(convs)) if (convs[i - 1][0], convs[i][0]) == ("depthwise", "pointwise")]
    # the convolution of the head belongs to the last block
    begins, ends = [0, *(end + 1 for end in ends[:-1])], [*ends[:-1], len(convs) - 1]
    chains = []
    for begin, end in zip(begins, ends, strict=True):
        part = convs[begin : end + 1]
        stages = tuple((kind, conv.kernel_size[0], conv.stride[0]) for kind, conv, _ in part)
        channels = (part[0][1].in_channels, *(conv.out_channels for _, conv, _ in part))
        chains.append(Chain(stages, part[0][2], channels))
    return list(dict.fromkeys(chains))


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


def relative_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Norm of each error over that of the truth; infinite where something is not a number."""
    errors = {}
    for name, exact in want.items():
        error = float((got[name].double() - exact).norm() / exact.norm().clamp_min(1e-30))
        errors[name] = error if error == error else float("inf")
    return errors


def bench_parity(bench: Bench, images: int = 8, dtypes: Sequence[torch.dtype] = tuple(ROUNDING)) -> int:
    """Compare every chain of a step with float64 and with eager autocast.

    Args:
        images: on a GPU; float64 is slow, and few images have every size of a layer.
        dtypes: of the chains.

    Returns:
        How many chains are left out because the time is over.

    Raises:
        SystemExit: an error is larger than it may be.
    """
    images, failed, done = images if bench.on_gpu else 2, list[str](), 0
    chains = distinct_chains(bench.space, bench.path, images) if bench.on_gpu else list(_SMALL)
    for chain in chains:
        if bench.left < 3:
            bench.row("left_out", what="parity", error=f"{len(chains) - done} chains: no time")
            break
        failed.append(str(chain))  # as one that raises
        with bench.attempt(str(chain)):
            if all([_compare_in(bench, chain, images, dtype) for dtype in dtypes]):
                failed.pop()
        done += 1
    if failed or not done:
        raise SystemExit(f"errors are too large in {len(failed)} chains: {'; '.join(failed)}")
    return len(chains) - done


def _compare_in(bench: Bench, chain: Chain, images: int, dtype: torch.dtype) -> bool:
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
    autocast = relative_errors(results(eager, x, stages, grad, wide=False), want)
    ours = relative_errors(results(kernels, x, stages, grad, wide=False), want)
    good = all(error <= MOST * autocast[name] + ROUNDINGS * ROUNDING[dtype] for name, error in ours.items())
    bench.row("parity", chain=str(chain), dtype=str(dtype)[6:], ok=good, ours=ours, eager=autocast)
    return good


# ---- bits


def bench_bits(bench: Bench) -> None:
    """Run the same random paths in several ways, which must all give the same bits of loss and gradients.

    Raises:
        SystemExit: they do not.
    """
    paths = random_paths(bench, 300 if bench.on_gpu else 2)
    first = run_bits(bench, ENGINE, paths, seconds=bench.left / 7)
    paths = paths[: len(first)]
    repeats = {"again": run_bits(bench, ENGINE, paths)}
    with reduced_by_launches():
        unfused = run_bits(bench, ENGINE, paths)
        repeats["eager"] = run_bits(bench, Variant("nasfast", "eager"), paths)
    wrong = []
    for name, bits in repeats.items():
        expected = unfused if name == "eager" else first
        different = [i for i, (a, b) in enumerate(zip(expected, bits, strict=True)) if not torch.equal(a, b)]
        bench.row("bits", what=name, paths=len(paths), different=len(different), first=different[:5])
        wrong += [f"{name}: {len(different)} of {len(paths)} paths"] * bool(different)
    if wrong or not paths:
        raise SystemExit(f"bits differ: {'; '.join(wrong) or 'no path ran'}")


def run_bits(bench: Bench, variant: Variant, paths: Sequence[Arch], *, seconds: float = float("inf")) -> list[Tensor]:
    """Loss and gradients of each path, on the CPU; as many paths as these seconds allow.

    Raises:
        NoCudaKernel: no CUDA kernel of a chain ran.
    """
    bits, start = [], time.monotonic()
    with on_cuda_kernels(bench, variant):
        net, engine, images, labels = make_engine(bench, variant)
        for path in paths:
            loss = engine.forward_backward(images, labels, [path]).loss
            gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
            bits.append(torch.cat([loss.flatten(), *gradients]).cpu())
            if time.monotonic() - start > seconds:
                break
    del net, engine
    gc.collect()
    return bits
