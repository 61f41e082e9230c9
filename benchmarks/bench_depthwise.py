"""depthwise_conv2d and pool_3x3, forward and backward, against eager PyTorch and torch.compile."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.harness import forward_backward, ratios, write_json
from nasfast import ops
from nasfast.measure.timing import measure

# (batch, channels, height): the three stages of a DARTS search at 32 x 32 input
SHAPES = [(64, 16, 32), (64, 32, 16), (64, 64, 8)]
# (kernel, stride, dilation); only reduction cells have stride 2
CONVS = [(3, 1, 1), (5, 1, 1), (7, 1, 1), (3, 1, 2), (5, 1, 2), (3, 2, 1), (5, 2, 1), (3, 2, 2), (5, 2, 2)]
POOLS = [("max", 1), ("avg", 1), ("max", 2), ("avg", 2)]
# how often an edge of a normal cell has each one: in two separable convolutions, of two stages each, and two dilated
EDGE = {(3, 1, 1): 2, (5, 1, 1): 2, (3, 1, 2): 1, (5, 1, 2): 1}
ROUNDS, QUICK_ROUNDS = 20, 5
OURS = "nasfast"
PHASES = ("forward", "backward", "full")
# which gradients backward computes
GRADIENTS = {"both": (True, True), "x": (True, False), "weight": (False, True)}


def setup_conv(x: torch.Tensor, kernel: int, stride: int, dilation: int, wants: tuple[bool, bool]) -> dict:
    """name -> (function, inputs, gradient of the result), one entry per provider."""
    channels = x.shape[1]
    weight = torch.randn(channels, 1, kernel, kernel).to(x.dtype)

    def torch_conv(x, weight):
        return F.conv2d(x, weight, None, stride, dilation * (kernel // 2), dilation, channels)

    def nasfast_conv(x, weight):
        return ops.depthwise_conv2d(x, weight, stride=stride, dilation=dilation, backend="cpu")

    # a compiled backward computes all gradients, whichever are needed
    return setup(nasfast_conv, torch_conv, [x, weight], wants, compiled=all(wants))


def setup_pool(x: torch.Tensor, kind: str, stride: int) -> dict:
    """name -> (function, inputs, gradient of the result), one entry per provider."""

    def torch_pool(x):
        if kind == "max":
            return F.max_pool2d(x, 3, stride, 1)
        return F.avg_pool2d(x, 3, stride, 1, count_include_pad=False)

    return setup(lambda x: ops.pool_3x3(x, kind=kind, stride=stride, backend="cpu"), torch_pool, [x], (True,))


def setup(
    ours: Callable, theirs: Callable, tensors: list[torch.Tensor], wants: tuple[bool, ...], *, compiled: bool = True
) -> dict:
    """name -> (function, inputs, gradient of the result), for our function and for each form of PyTorch's."""
    grad = torch.randn_like(theirs(*tensors))

    def inputs(memory_format):
        x, *rest = (t.clone() for t in tensors)
        leaves = [x.contiguous(memory_format=memory_format), *rest]
        leaves = [leaf.requires_grad_(want) for leaf, want in zip(leaves, wants, strict=True)]
        return leaves, grad.contiguous(memory_format=memory_format)

    nchw, nhwc = inputs(torch.contiguous_format), inputs(torch.channels_last)
    variants = {
        OURS: (ours, *nhwc),
        "eager contiguous": (theirs, *nchw),
        "eager channels_last": (theirs, *nhwc),
    }
    if compiled:
        # without a reset, compiled graphs of other shapes would change this one
        torch.compiler.reset()
        variants["compile channels_last"] = (torch.compile(theirs, dynamic=False), *nhwc)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"float32 and both gradients only, {QUICK_ROUNDS} rounds")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    rounds = QUICK_ROUNDS if args.quick else ROUNDS

    rows = []

    def run(x: torch.Tensor, name: str, providers: dict) -> dict:
        summaries = measure({key: forward_backward(*p) for key, p in providers.items()}, rounds=rounds)
        ratio = {phase: ratios(summaries, OURS, phase) for phase in PHASES}
        dtype = str(x.dtype).removeprefix("torch.")
        rows.append({"shape": list(x.shape), "dtype": dtype, "op": name, "times": summaries, "ratios": ratio})
        print(f"{dtype} {'x'.join(map(str, x.shape))} {name}")
        for key, phases in summaries.items():
            cells = [
                f"{phase} {phases[phase]['median_ms']:8.2f}"
                + (f" x{ratio[phase][key]:<6.2f}" if key != OURS else " " * 8)
                for phase in PHASES
            ]
            print(f"  {key:22s} {'  '.join(cells)}", flush=True)
        return summaries

    print("times are medians in ms; xN: N times as long as nasfast")
    for dtype in (torch.float32,) if args.quick else (torch.float32, torch.bfloat16):
        for batch, channels, height in SHAPES:
            x = torch.randn(batch, channels, height, height).to(dtype).contiguous(memory_format=torch.channels_last)
            edge: dict[str, float] = {}
            for conv in CONVS:
                for gradients, wants in GRADIENTS.items():
                    if args.quick and gradients != "both":
                        continue
                    name = "k{}s{}d{}".format(*conv) + f" gradients {gradients}"
                    summaries = run(x, name, setup_conv(x, *conv, wants))
                    if gradients == "both":
                        for key, phases in summaries.items():
                            edge[key] = edge.get(key, 0) + EDGE.get(conv, 0) * phases["full"]["median_ms"]
            for kind, stride in POOLS:
                run(x, f"{kind}_pool s{stride}", setup_pool(x, kind, stride))
            relative = {key: time / edge[OURS] for key, time in edge.items() if key != OURS}
            rows.append(
                {"shape": list(x.shape), "dtype": rows[-1]["dtype"], "op": "DARTS edge", "ms": edge, "ratios": relative}
            )
            print("the depthwise convolutions of one DARTS edge, forward and backward, ms:")
            print("  " + ", ".join(f"{key} {time:.2f}" for key, time in edge.items()), flush=True)
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
