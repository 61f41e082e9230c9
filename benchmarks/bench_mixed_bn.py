"""mixed_bn against eager PyTorch and torch.compile; it sums the operations of all edges into a node."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.harness import forward_backward, positive, ratios, saved_bytes, write_json
from nasfast import ops
from nasfast.measure.timing import measure

# (channels, height) of the nodes in a search network with 16 initial channels and 32 x 32 images
SHAPES = [(16, 32), (32, 16), (64, 8)]
# number of tensors: seven operations on each of two or five edges
TENSORS = (14, 35)
BATCH, QUICK_BATCH = 64, 16
ROUNDS, QUICK_ROUNDS = 15, 5
OURS = "nasfast"


def torch_mixed_bn(gates, *xs):
    return sum(gate * F.batch_norm(x, None, None, None, None, True) for gate, x in zip(gates, xs, strict=True))


def nasfast_mixed_bn(gates, *xs):
    return ops.mixed_bn(xs, gates, normalize=[True] * len(xs), backend="cpu")


def setup_mixed_bn(count: int, batch: int, channels: int, height: int, dtype: torch.dtype) -> dict:
    """name -> (function, inputs, gradient of the result), one entry per provider."""
    xs = [torch.randn(batch, channels, height, height).to(dtype) for _ in range(count)]
    grad = torch.randn(xs[0].shape).to(dtype)
    gates = torch.softmax(torch.randn(count // 7, 7), 1).view(-1)

    def inputs(memory_format):
        copies = [gates.clone(), *(x.clone(memory_format=memory_format) for x in xs)]
        return [c.requires_grad_() for c in copies], grad.contiguous(memory_format=memory_format)

    nchw, nhwc = inputs(torch.contiguous_format), inputs(torch.channels_last)
    # without a reset, compiled graphs of other shapes would change this one
    torch.compiler.reset()
    return {
        OURS: (nasfast_mixed_bn, *nhwc),
        "eager contiguous": (torch_mixed_bn, *nchw),
        "eager channels_last": (torch_mixed_bn, *nhwc),
        "compile channels_last": (torch.compile(torch_mixed_bn, dynamic=False), *nhwc),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"batch {QUICK_BATCH}, {QUICK_ROUNDS} rounds")
    parser.add_argument("--threads", type=positive, help="CPU threads of PyTorch and the kernels; default: all")
    parser.add_argument("--tensors", type=positive, nargs="+", default=TENSORS, help="multiples of 7")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    batch, rounds = (QUICK_BATCH, QUICK_ROUNDS) if args.quick else (BATCH, ROUNDS)
    if args.threads:
        torch.set_num_threads(args.threads)

    rows = []
    print(
        "times are medians in ms; xN: N times as long as nasfast; saved: bytes kept for backward / bytes of all inputs"
    )
    for dtype in args.dtypes:
        for count in args.tensors:
            for channels, height in SHAPES:
                providers = setup_mixed_bn(count, batch, channels, height, getattr(torch, dtype))
                summaries = measure({name: forward_backward(*p) for name, p in providers.items()}, rounds=rounds)
                x_bytes = sum(x.nbytes for x in providers[OURS][1][1:])
                saved = {name: saved_bytes(function, inputs) for name, (function, inputs, _) in providers.items()}
                ratio = {phase: ratios(summaries, OURS, phase) for phase in ("forward", "backward", "full")}
                row = {
                    "tensors": count,
                    "shape": [batch, channels, height, height],
                    "dtype": dtype,
                    "threads": torch.get_num_threads(),
                    "x_bytes": x_bytes,
                    "saved_bytes": saved,
                    "times": summaries,
                    "ratios": ratio,
                }
                rows.append(row)
                print(f"{dtype} {count} tensors of {'x'.join(map(str, row['shape']))}, {row['threads']} threads")
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
