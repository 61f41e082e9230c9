"""Writes the summary of the plan's rows: times, ratios to the best peer, multiples of the floor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]
_LONGEST, _NAMED = 12, 15


def summarise(parts: dict[str, Rows]) -> str:
    """The summary of the rows of each part, in the given order."""
    pages: dict[str, Callable[[Rows], list[str]]] = {
        "machine": _machine,
        "step": _steps,
        "kernels": _kernels,
        "tests": _tests,
        "paths": _paths,
        "native": _native,
        "compile": _steps,
    }
    lines = []
    for name, rows in parts.items():
        lines += [_heading(name, rows), *pages[name](rows)]
        for row in _of("error", rows) + _of("left_out", rows):
            lines.append(f"  {'ERROR' if row['kind'] == 'error' else 'left out'}: {row['what']}: {row['error'][:300]}")
        for row in _of("end", rows):
            lines += [] if row["ok"] else [f"  | {line[:200]}" for line in row["tail"][-6:]]
    return "\n".join(lines) + "\n"


def _of(kind: str, rows: Rows) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def _heading(name: str, rows: Rows) -> str:
    for end in _of("end", rows):
        return f"{name}: {end['seconds']} s" + ("" if end["ok"] else f", FAILED: {end['error']}")
    return f"{name}: did not end"


def _machine(rows: Rows) -> list[str]:
    lines = []
    for row in _of("machine", rows):
        lines.append(
            f"  {row['gpu'] or row['cpu']}, torch {row['torch']}, Triton {row['packages']['triton']}, "
            f"Python {row['python']}, {row['cores']} cores"
        )
    rates = [f"{r['what']} {r['GB_per_s']:.0f} GB/s" for r in _of("ceiling", rows) if "GB_per_s" in r]
    rates += [f"{r['what']} {r['TFLOP_per_s']:.1f} TFLOP/s" for r in _of("ceiling", rows) if "TFLOP_per_s" in r]
    lines += [f"  {', '.join(rates)}"] * bool(rates)
    for row in _of("launch", rows):
        parts = [f"{key} {value:.1f}" for key, value in row.items() if key.endswith("_us")]
        lines.append(f"  launch by {row['name']}: {', '.join(parts)}")
    return lines


def _steps(rows: Rows) -> list[str]:
    steps = {row["name"]: row for row in _of("step", rows)}  # a later row of the same name replaces an earlier one
    variants = {row["name"]: row for row in _of("variant", rows)}
    floor = next((row["ms"] for row in _of("floor", rows)), None)
    lines = []
    for name, row in steps.items():
        more = [f"first {variants[name]['first_s']:.1f} s"] if name in variants else []
        more += [f"peak {variants[name]['peak_MiB']:.0f} MiB"] if "peak_MiB" in variants.get(name, {}) else []
        more += [f"{row['median_ms'] / floor:.1f} x floor"] if floor else []
        quantiles = f"({row['q20_ms']:.3f} - {row['q80_ms']:.3f})"
        lines.append(f"  {name:30} {row['median_ms']:9.3f} ms {quantiles}  {', '.join(more)}")
    lines += [f"  floor {floor:.3f} ms"] if floor else []
    return lines + _ratios(steps) + _losses(variants)


def _ratios(steps: dict[str, dict[str, Any]]) -> list[str]:
    """Time of each variant of nasfast divided by that of the best peer that trains the same parameters."""
    lines = []
    for name, row in steps.items():
        trains = name.partition(", ")[2]
        peers = [n for n in steps if n.startswith("torch") and n.partition(", ")[2] == trains]
        if name.startswith("nasfast") and peers:
            best = min(peers, key=lambda n: steps[n]["median_ms"])
            lines.append(f"  {name}: {row['median_ms'] / steps[best]['median_ms']:.2f} of {best}")
    return lines


def _losses(variants: dict[str, dict[str, Any]]) -> list[str]:
    losses = {name: row["loss"] for name, row in variants.items()}
    if not losses or max(losses.values()) - min(losses.values()) <= 0.05 * abs(min(losses.values())):
        return []
    return [f"  LOSSES DIFFER: {losses}"]


def _kernels(rows: Rows) -> list[str]:
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in _of("kernel", rows)):
        found = [row for row in _of("kernel", rows) if row["variant"] == variant]
        us, launches = Counter(), Counter()
        for row in found:
            us[row["kernel"]] += row["us"]
            launches[row["kernel"]] += row["launches"]
        lines.append(f"  {variant}: {launches.total()} launches, {sum(us.values()) / 1e3:.3f} ms of kernels")
        for name, total in us.most_common(_LONGEST):
            lines.append(f"    {name[:60]:60} {launches[name]:4} launches {total:10.1f} us")
    for row in _of("projection", rows):
        lines.append(f"  {row['label']}: " + ", ".join(f"{card} {ms:.2f} ms" for card, ms in row["ms"].items()))
    return lines


def _tests(rows: Rows) -> list[str]:
    tests = _of("test", rows)
    counts = Counter(row["outcome"] for row in tests)
    lines = ["  " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))] if tests else []
    reasons = Counter(row.get("reason") for row in tests if row["outcome"] == "skipped")
    lines += [f"  skipped {number}: {reason}" for reason, number in reasons.most_common(3)]
    reasons = Counter(row["error"] for row in tests if row["outcome"] == "uncollected")
    lines += [f"  uncollected {number}: {reason[:160]}" for reason, number in reasons.most_common(3)]
    failed = [row for row in tests if row["outcome"] == "failed"]
    lines += [f"  FAILED {row['test']}: {row['error'][:160]}" for row in failed[:_NAMED]]
    return lines + ([f"  and {len(failed) - _NAMED} more failed"] if len(failed) > _NAMED else [])


def _paths(rows: Rows) -> list[str]:
    return [
        f"  {row['name']:20} {row['images_per_s']:10.0f} images/s (first pass {row['first_s']:.1f} s)"
        for row in _of("paths", rows)
    ]


def _native(rows: Rows) -> list[str]:
    lines = [f"  {row['what']}: {row['seconds']} s, exit code {row['code']}" for row in _of("ran", rows)]
    times: dict[str, dict[str, float]] = {}
    for row in _of("orthogonalize", rows):
        times.setdefault(row["of"], {})[row["name"]] = row["median_ms"]
    lines += [
        f"  {of:10} " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()) for of, found in times.items()
    ]
    return _tests(rows) + lines
