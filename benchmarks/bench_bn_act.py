"""bn_act with relu6 in training mode against eager PyTorch and torch.compile."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.harness import forward_backward, ratios, saved_bytes, write_json
from nasfast import ops
from nasfast.measure.timing import measure

# (channels, height): expanded tensors of the MobileNetV2 space at 224 x 224 input
SHAPES = [(144, 112), (192, 56), (336, 28), (672, 14), (1536, 7)]
BATCH, QUICK_BATCH = 32, 8
ROUNDS, QUICK_ROUNDS = 30, 9
OURS = "nasfast"


def torch_bn_act(x, weight, bias):
    return F.relu6(F.batch_norm(x, None, None, weight, bias, True))


def nasfast_bn_act(x, weight, bias):
    return ops.bn_act(x, weight, bias, act="relu6", backend="cpu")


def setup_bn_act(batch: int, channels: int, height: int, dtype: torch.dtype) -> dict:
    """name -> (function, inputs, gradient of the result), one entry per provider."""
    x = torch.randn(batch, channels, height, height).to(dtype)
    grad = torch.randn(x.shape).to(dtype)
    vectors = [torch.rand(channels).add_(0.5), torch.randn(channels)]

    def inputs(memory_format):
        copies = [x.clone(memory_format=memory_format), *(v.clone() for v in vectors)]
        return [c.requires_grad_() for c in copies], grad.contiguous(memory_format=memory_format)

    nchw, nhwc = inputs(torch.contiguous_format), inputs(torch.channels_last)
    # without a reset, compiled graphs of other shapes would change this one
    torch.compiler.reset()
    return {
        OURS: (nasfast_bn_act, *nhwc),
        "eager contiguous": (torch_bn_act, *nchw),
        "eager channels_last": (torch_bn_act, *nhwc),
        "compile channels_last": (torch.compile(torch_bn_act, dynamic=False), *nhwc),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"batch {QUICK_BATCH}, {QUICK_ROUNDS} rounds")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    batch, rounds = (QUICK_BATCH, QUICK_ROUNDS) if args.quick else (BATCH, ROUNDS)

    rows = []
    print("times are medians in ms; xN: N times as long as nasfast; saved: bytes kept for backward / bytes of x")
    for dtype in (torch.float32, torch.bfloat16):
        for channels, height in SHAPES:
            providers = setup_bn_act(batch, channels, height, dtype)
            summaries = measure({name: forward_backward(*p) for name, p in providers.items()}, rounds=rounds)
            x_bytes = providers[OURS][1][0].nbytes
            saved = {name: saved_bytes(function, inputs) for name, (function, inputs, _) in providers.items()}
            ratio = {phase: ratios(summaries, OURS, phase) for phase in ("forward", "backward", "full")}
            row = {
                "shape": [batch, channels, height, height],
                "dtype": str(dtype).removeprefix("torch."),
                "x_bytes": x_bytes,
                "saved_bytes": saved,
                "times": summaries,
                "ratios": ratio,
            }
            rows.append(row)
            print(f"{row['dtype']} {'x'.join(map(str, row['shape']))}")
            for name, phases in summaries.items():
                cells = [
                    f"{phase} {phases[phase]['median_ms']:8.2f}"
                    + (f" x{ratio[phase][name]:<5.2f}" if name != OURS else " " * 7)
                    for phase in ratio
                ]
                print(f"  {name:22s} {'  '.join(cells)}  saved {saved[name] / x_bytes:.2f}", flush=True)
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
