"""orthogonalize on all weights of the 6^20 supernet against torch, by size class; then draws included, and the build.

A depthwise weight is a batch of k x k filters, any other weight one matrix. All variants get the same Gaussian input.
The last two rows measure whole calls on the CPU: `orthogonalize_` on all weights against a loop over
torch.nn.init.orthogonal_, and making the supernet with each initialisation. Their "cpu" is the time of all threads,
which another program on the same cores hardly changes.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import nasfast
from benchmarks.harness import positive, ratios, write_json
from nasfast import ops
from nasfast.measure.timing import measure, measuring

ROUNDS, QUICK_ROUNDS = 15, 5
OURS = "nasfast"
# largest number of columns in each class; a wide matrix is transposed first
CLASSES = (32, 64, 128, 256)
GEMM_SIDE = 2048


def weights(device: str) -> dict[str, list[Tensor]]:
    """Size class -> Gaussian matrices, and "all"."""
    generator = torch.Generator().manual_seed(0)
    classes: dict[str, list[Tensor]] = {"filters": [], **{_name(i): [] for i in range(len(CLASSES) + 1)}, "all": []}
    net = nasfast.Supernet(nasfast.spaces.mobilenet_v2(), init="he")
    for layer in net.modules():
        if not isinstance(layer, (nn.Conv2d, nn.Linear)):
            continue
        shape = layer.weight.shape
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1:
            name, size = "filters", (shape[0], *shape[2:])
        else:
            size = (shape[0], shape[1:].numel())
            name = _name(sum(min(size) > limit for limit in CLASSES))
        z = torch.randn(size, generator=generator).to(device)
        classes[name].append(z)
        classes["all"].append(z)
    return classes


def _name(i_class: int) -> str:
    return f"n <= {CLASSES[i_class]}" if i_class < len(CLASSES) else f"n > {CLASSES[-1]}"


def flops(z: Tensor) -> float:
    """Operations of a Householder QR and of forming Q, as LAPACK counts them: 2 (2 m n^2 - 2 n^3 / 3) per matrix."""
    m, n = max(z.shape[-2:]), min(z.shape[-2:])
    return z.numel() / (m * n) * 2 * (2 * m * n**2 - 2 * n**3 / 3)


def torch_qr(z: Tensor) -> Tensor:
    """Orthogonalise a matrix as torch.nn.init.orthogonal_ does."""
    tall = z if z.shape[-2] >= z.shape[-1] else z.mT
    q, r = torch.linalg.qr(tall)
    q *= r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return (q if tall is z else q.mT).contiguous()


def torch_householder(z: Tensor) -> Tensor:
    """Orthogonalise a matrix in the same way, but without forming R."""
    tall = z if z.shape[-2] >= z.shape[-1] else z.mT
    a, tau = torch.geqrf(tall)
    signs = a.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    q = torch.linalg.householder_product(a, tau).mul_(signs)
    return (q if tall is z else q.mT).contiguous()


def grouped_qr(matrices: list[Tensor]) -> list[Tensor]:
    """Orthogonalise all matrices, with one torch.linalg.qr per shape."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for z in matrices:
        groups.setdefault(z.shape, []).append(z)
    return [q for group in groups.values() for q in torch_qr(torch.stack(group))]


def setup_orthogonalize(matrices: list[Tensor]) -> dict[str, Callable[[], dict[str, float]]]:
    """name -> variant for `measure`."""

    def variant(function: Callable[[list[Tensor]], object]) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            _synchronize(matrices)
            start = time.perf_counter()
            function(matrices)
            _synchronize(matrices)
            return {"full": time.perf_counter() - start}

        return run

    return {
        OURS: variant(ops.orthogonalize),
        "qr loop": variant(lambda zs: [torch_qr(z) for z in zs]),
        "geqrf loop": variant(lambda zs: [torch_householder(z) for z in zs]),
        "qr grouped": variant(grouped_qr),
    }


def _timed(function: Callable[[], object]) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        cpu, start = time.process_time(), time.perf_counter()
        function()
        return {"full": time.perf_counter() - start, "cpu": time.process_time() - cpu}

    return run


def setup_fill() -> dict[str, Callable[[], dict[str, float]]]:
    """name -> variant for `measure`; each draws and orthogonalises all weights, a depthwise one as one flat matrix."""
    net = nasfast.Supernet(nasfast.spaces.mobilenet_v2(), init="he")
    tensors = [layer.weight for layer in net.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    return {
        OURS: _timed(lambda: nasfast.orthogonalize_(tensors)),
        "torch.nn.init loop": _timed(lambda: [nn.init.orthogonal_(tensor) for tensor in tensors]),
    }


def setup_build() -> dict[str, Callable[[], dict[str, float]]]:
    """name -> variant for `measure`; each makes the supernet."""
    space = nasfast.spaces.mobilenet_v2()
    return {name: _timed(lambda name=name: nasfast.Supernet(space, init=name)) for name in ("orthogonal", "aligned")}


def _synchronize(matrices: list[Tensor]) -> None:
    if matrices[0].is_cuda:
        torch.cuda.synchronize(matrices[0].device)


def setup_gemm(device: str) -> dict[str, Callable[[], dict[str, float]]]:
    """A square float32 matrix product, to measure the peak of the device."""
    a = torch.randn(GEMM_SIDE, GEMM_SIDE, device=device)

    def run() -> dict[str, float]:
        _synchronize([a])
        start = time.perf_counter()
        a @ a
        _synchronize([a])
        return {"full": time.perf_counter() - start}

    return {"gemm": run}


def benchmark(device: str, rounds: int) -> list[dict]:
    """Measure one row per size class."""
    peak = 2 * GEMM_SIDE**3 / measure(setup_gemm(device), rounds=rounds)["gemm"]["full"]["median_ms"] / 1e6
    print(
        f"{device}: float32 matrix product {peak:.0f} GFLOP/s; times are medians in ms; xN: N times as long as nasfast"
    )
    rows = []
    for name, matrices in weights(device).items():
        summaries = measure(setup_orthogonalize(matrices), rounds=rounds)
        ratio = ratios(summaries, OURS, "full")
        gflop = sum(map(flops, matrices)) / 1e9
        rate = gflop / summaries[OURS]["full"]["median_ms"] * 1e3
        rows.append(
            {
                "device": device,
                "class": name,
                "tensors": len(matrices),
                "matrices": sum(z.shape[:-2].numel() for z in matrices),
                "gflop": gflop,
                "gflop_per_s": rate,
                "peak_gflop_per_s": peak,
                "fraction_of_peak": rate / peak,
                "times": summaries,
                "ratios": ratio,
            }
        )
        cells = [f"{n} {s['full']['median_ms']:.1f} ms x{ratio[n]:.2f}" for n, s in summaries.items() if n != OURS]
        mine = summaries[OURS]["full"]["median_ms"]
        print(
            f"  {name:9s} {gflop:6.2f} GFLOP {mine:7.1f} ms {rate:6.1f} GFLOP/s {rate / peak:4.0%}  {'  '.join(cells)}"
        )
    return rows


def benchmark_whole(rounds: int) -> list[dict]:
    """Measure `orthogonalize_` and the build of the supernet, one row each."""
    rows = []
    for name, variants in (("orthogonalize_", setup_fill()), ("build", setup_build())):
        summaries = measure(variants, rounds=rounds)
        row: dict = {"device": "cpu", "class": name, "times": summaries}
        if OURS in summaries:
            row["ratios"] = {phase: ratios(summaries, OURS, phase) for phase in ("full", "cpu")}
        rows.append(row)
        cells = [
            f"{n} {s['full']['median_ms']:.0f} ms (CPU time {s['cpu']['median_ms']:.0f})" for n, s in summaries.items()
        ]
        print(f"  {name:14s} {'  '.join(cells)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--part", choices=("classes", "whole"), help="only the size classes, or only the whole calls")
    parser.add_argument("--threads", type=positive, help="CPU threads; default: torch's choice")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    rows = []
    with measuring(args.threads or 0):
        rounds = QUICK_ROUNDS if args.quick else ROUNDS
        if args.part != "whole":
            for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
                rows += benchmark(device, rounds)
        if args.part != "classes":
            rows += benchmark_whole(rounds)
        if args.out:
            write_json(args.out, rows)


if __name__ == "__main__":
    main()
