"""The tables of the isometry study, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from nasfast.research.studies.isometry.rows import (
    SPREADS,
    ConvolutionMoments,
    PathSpread,
    Row,
    Spread,
    bn_text,
    spread_means,
)


def candidate_lines(settings: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Every candidate or part, with its moments and its gain under every setting."""
    by_place: dict[tuple[int, str], dict[str, Row]] = {}
    for row in rows:
        by_place.setdefault((row.layer, row.name), {})[row.setting] = row
    width = max(len(name) for _, name in by_place)
    head = f"{'':{width + 4}}" + "".join(f" | {s:^37}" for s in settings)
    titles = f" | {'phi':>6} {'varphi':>7} {'gain':>5} {'mod. phi':>8} {'varphi':>7}"
    columns = f"{'':{width + 4}}" + titles * len(settings)
    lines = [head, columns]
    for (layer, name), found in by_place.items():
        cells = []
        for setting in settings:
            if setting not in found:
                cells.append(" " * 37)
                continue
            row = found[setting]
            module = row.module or row.branch
            cells.append(
                f"{row.branch.phi:6.3f} {row.branch.varphi:7.3f} {row.gain:5.2f} {module.phi:8.3f} {module.varphi:7.3f}"
            )
        place = f"{layer:3} " if layer >= 0 else "    "
        lines.append(f"{place}{name:{width}} | " + " | ".join(cells))
    return [*lines, ""]


def convolution_lines(convolutions: Sequence[ConvolutionMoments]) -> list[str]:
    """Every kind of convolution beside its closed form."""
    if not convolutions:
        return []
    lines = [f"{'convolutions, circular':48} {'count':>5} {'phi/g^2':>8} {'varphi/g^4':>10} {'closed form':>11}"]
    for c in convolutions:
        expected = "-" if c.expected_varphi is None else f"{c.expected_varphi:.4f}"
        name = f"{c.setting}: {c.kind}"
        lines.append(f"{name:48} {c.count:5} {c.phi:8.4f} {c.varphi:10.4f} {expected:>11}")
    return [*lines, ""]


def fairness_lines(spreads: Sequence[Spread]) -> list[str]:
    """The spreads over candidates, averaged over layers."""
    if not spreads:
        return []
    lines = [f"{'fairness, mean over layers (0 is fair)':44}" + "".join(f" {k:>12}" for k in SPREADS)]
    for m in spread_means(spreads):
        cells = "".join(f" {'-':>12}" if getattr(m, k) is None else f" {getattr(m, k):12.4f}" for k in SPREADS)
        lines.append(f"{m.setting}, {bn_text(m.indicator_bn)}".ljust(44) + cells)
    return [*lines, ""]


def depth_lines(depth: Sequence[PathSpread]) -> list[str]:
    """The spread over paths at five depths."""
    if not depth:
        return []
    layers = len(depth[0].std)
    shown = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    lines = [f"{'std of log Var(h_l) over random paths':44}" + "".join(f" {f'layer {i}':>10}" for i in shown)]
    for d in depth:
        name = f"{d.setting}, {bn_text(d.indicator_bn)}"
        lines.append(f"{name:44}" + "".join(f" {d.std[i]:10.4f}" for i in shown))
    return [*lines, ""]
