"""Draws docs/steps.svg, the picture of README, from the results of steps: `python -m benchmarks.draw_steps`."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from benchmarks.harness import RESULTS, ROOT, medians, read_json

PICTURE = ROOT / "docs" / "steps.svg"
FILES = ("allocators_supernet_cpu-2core-avx512.json", "allocators_fuse_cpu-2core-avx512.json")
USUAL = "glibc"

_NAMES = {
    "mobilenet_v2": "mobilenet_v2 supernet",
    "shufflenet_v2": "shufflenet_v2 supernet",
    "nas_bench_macro": "nas_bench_macro supernet",
    "torchvision mobilenet_v2": "torchvision mobilenet_v2, fuse",
}
_LEFT, _WIDTH, _BAR, _ROW, _TOP = 230, 400, 9, 30, 34


class Bar(NamedTuple):
    """A step under the best allocator of each side, in milliseconds, and the ratio under the usual allocator."""

    name: str
    ours: float
    best: float
    usual: float


def steps() -> list[Bar]:
    """A bar for every workload and type of the files.

    A peer of either type counts against bfloat16, because PyTorch's own steps are slower in bfloat16 on some networks.
    """
    # by workload and type: ms of ours and of the best peer, by allocator
    pairs: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for file in FILES:
        for row in read_json(RESULTS / file):
            times = medians({name: variant["times"] for name, variant in row["variants"].items()})
            peers = {name: ms for name, ms in times.items() if not name.startswith("nasfast")}
            for dtype in ("fp32", "bf16"):
                allowed = [ms for name, ms in peers.items() if dtype == "bf16" or name.endswith(dtype)]
                pair = times[f"nasfast {dtype}"], min(allowed)
                pairs.setdefault((row["workload"], dtype), {})[row["allocator"]] = pair
    bars = []
    for (workload, dtype), by_allocator in pairs.items():
        ours, best = (min(times) for times in zip(*by_allocator.values(), strict=True))
        usual = by_allocator[USUAL][0] / by_allocator[USUAL][1]
        bars.append(Bar(f"{_NAMES[workload]}, {dtype}", ours, best, usual))
    return bars


def picture(rows: list[Bar]) -> str:
    """An SVG that reads well on light and dark pages: for each step a bar of PyTorch and one of nasfast."""
    height = _TOP + _ROW * len(rows) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 90} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#888">',
        f'<text x="{_LEFT}" y="16">one training step beside the fastest of eager PyTorch and torch.compile with any '
        f"allocator (in brackets: with glibc as it is)</text>",
    ]
    for i, (name, ours, best, usual) in enumerate(rows):
        y, width = _TOP + _ROW * i, round(_WIDTH * ours / best, 1)
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_BAR}" fill="#b8b8b8"/>',
            f'<text x="{_LEFT + _WIDTH + 6}" y="{y + 9}">{best:.0f} ms</text>',
            f'<rect x="{_LEFT}" y="{y + _BAR + 1}" width="{width}" height="{_BAR}" fill="#2a78d6"/>',
            f'<text x="{_LEFT + width + 6}" y="{y + 2 * _BAR + 1}" fill="#2a78d6">nasfast {ours:.0f} ms, '
            f"{ours / best:.2f} ({usual:.2f})</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(steps()))
