"""Writes the page of the plan's rows: what users wait for, ratios to the peers, and what was proven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_step import ROWS as MEASURED
from benchmarks.gpu_step import Launch, by_family, fit, read

Rows = list[dict[str, Any]]
_NAMED = 15


def report(parts: dict[str, Rows]) -> str:
    """The page of the rows of each part, in the given order."""
    pages: dict[str, Callable[[Rows], list[str]]] = {
        "demo": _demo,
        "fuse": _steps,
        "adapt": _steps,
        "command": _steps,
        "engine": _steps,
        "peer": _steps,
        "compile": _steps,
        "matrices": _matrices,
        "parity": _parity,
        "launches": _launches,
        "tests": _tests,
    }
    lines = ["# nasfast on a GPU", ""]
    for name, rows in parts.items():
        lines += [f"## {_heading(name, rows)}", ""]
        lines += [f"- {_LINES[row['kind']](row)}" for row in rows if row["kind"] in _LINES]
        kind = name.split()[0]
        lines += pages[kind](rows) if kind in pages else []
        for row in _select("error", rows) + _select("left_out", rows):
            lines.append(f"- {'ERROR' if row['kind'] == 'error' else 'left out'}: {row['what']}: {row['error'][:300]}")
        for row in _select("end", rows):
            lines += [] if row["ok"] else ["", "```", *(line[:200] for line in row["tail"][-6:]), "```"]
        lines.append("")
    return "\n".join(lines)


def _select(kind: str, rows: Rows) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def _heading(name: str, rows: Rows) -> str:
    for end in _select("end", rows):
        return f"{name}: {end['seconds']} s" + ("" if end["ok"] else f", FAILED: {end['error']}")
    return f"{name}: did not end"


def ratio(ours: dict[str, Any], other: dict[str, Any]) -> str:
    """Ours divided by the other, with the interval of their quantiles."""
    least, most = ours["q20_ms"] / other["q80_ms"], ours["q80_ms"] / other["q20_ms"]
    return f"{ours['median_ms'] / other['median_ms']:.2f} ({least:.2f} to {most:.2f})"


def _machine_line(row: dict[str, Any]) -> str:
    versions = f"torch {row['torch']}, torchvision {row['packages']['torchvision']}, Python {row['python']}"
    return f"{row['gpu'] or row['cpu']}, {versions}, {row['cores']} cores"


def _sanitizer_line(row: dict[str, Any]) -> str:
    ended = "no time" if row["code"] is None else f"exit code {row['code']}"
    return f"{row['tool']}: {ended} after {row['seconds']} s; {'; '.join(row['said'])}"


def _counters_line(row: dict[str, Any]) -> str:
    shares = [f"{name.partition('.')[0]} {value}" for name, value in row.items() if name.endswith("elapsed")]
    return f"{row['kernel'][:80]}: {row['time']}; {', '.join(shares)}"


# what the page says of a row of each kind that has a line of its own
_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "built": lambda row: (
        f"{'compiled' if row['compiled'] else 'was there'}: {row['seconds']} s; "
        f"kernels for {(row['build'] or {}).get('cuda_archs')}, with torch {(row['build'] or {}).get('torch_version')}"
    ),
    "machine": _machine_line,
    "bits": lambda row: f"{row['what']}: {row['paths'] - row['different']} of {row['paths']} paths have the same bits",
    "sanitizer": _sanitizer_line,
    "counters": _counters_line,
}


def _demo(rows: Rows) -> list[str]:
    steps = _select("demo", rows)
    if not steps:
        return []
    first, last = steps[0], steps[-1]
    return [
        f"- {first['precision']}: {first['step']} steps after {first['s']:.1f} s, {last['step']} of {last['of']} after "
        f"{last['s']:.1f} s; {last['images_per_s']:,.0f} images per second in the last ones"
    ]


def _steps(rows: Rows) -> list[str]:
    """Medians, first steps, and the ratio of the last row that is ours to each other row."""
    # by variant; a later row of the same name replaces an earlier one
    times, firsts = ({row["name"]: row for row in _select(kind, rows)} for kind in ("step", "first_step"))
    ours = next((name for name in reversed(times) if "nasfast" in name), None)
    floor = next((row["ms"] for row in _select("floor", rows)), None)
    lines = ["| | ms (20 % to 80 %) | first step | times the floor | nasfast / it |", "|---|---|---|---|---|"]
    for name in firsts:
        cells = [name, "-", f"{firsts[name]['first_s']:.1f} s", "", ""]
        if row := times.get(name):
            cells[1] = f"{row['median_ms']:.3f} ({row['q20_ms']:.3f} to {row['q80_ms']:.3f})"
            cells[3] = f"{row['median_ms'] / floor:.1f}" if floor else ""
            cells[4] = ratio(times[ours], row) if ours and name != ours else ""
        lines.append(f"| {' | '.join(cells)} |")
    lines += [""]
    for row in (*_select("kernels", rows), *(row for row in firsts.values() if "cuda" in row)):
        ran = ", ".join(f"{name} {count}" for name, count in row["cuda"].items())
        lines.append(f"- {row.get('variant', row.get('name'))} ran: {ran or 'kernels of PyTorch alone'}")
    losses = {name: row["loss"] for name, row in firsts.items() if "loss" in row}
    if losses and max(losses.values()) - min(losses.values()) > 0.05 * abs(min(losses.values())):
        lines.append(f"- LOSSES DIFFER: {losses}")
    return lines


def _matrices(rows: Rows) -> list[str]:
    """For each case, our median and its ratio to the fastest of PyTorch's."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _select("matrices", rows):
        cases.setdefault(row["case"], {})[row["name"]] = row
    lines = []
    for case, times in cases.items():
        for name in times.keys() & {"cuda", "cpu"}:
            peer = min(times.keys() - {name}, key=lambda other: times[other]["median_ms"])
            lines.append(
                f"- {case}: {times[name]['median_ms']:.3g} ms, {ratio(times[name], times[peer])} of torch, {peer}"
            )
    return lines


def _parity(rows: Rows) -> list[str]:
    chains = _select("parity", rows)
    if not chains:
        return []
    bad = [row for row in chains if not row["ok"]]
    lines = [f"- {len(chains) - len(bad)} of {len(chains)} chains and types have errors as small as eager autocast's"]
    for row in bad[:_NAMED]:
        name = max(row["ours"], key=lambda n, row=row: row["ours"][n] / max(row["eager"][n], 1e-12))
        error = f"{name}: {row['ours'][name]:.2e}, eager {row['eager'][name]:.2e}"
        lines.append(f"- WRONG: {row['chain']}, {row['dtype']}: {error}")
    return lines


def _launches(rows: Rows) -> list[str]:
    lines = [
        f"- {row['measured']} launches of CUDA kernels take {row['us']:.0f} us of a step of {row['all_us']:.0f} us"
        for row in _select("launches", rows)
    ]
    launches = [
        Launch(row["kernel"], row["chain"], row["bytes"], row["products"], row["us"])
        for row in _select("launch_of_step", rows)
        if "bytes" in row
    ]
    if not launches:
        return lines
    constants = fit(read(MEASURED).launches)
    lines += ["", f"| kernel | launches | us | by the constants of {MEASURED.name} | ratio |", "|---|---|---|---|---|"]
    us = by_family(launches, [launch.us for launch in launches])
    formula = by_family(launches, map(constants.microseconds, launches))
    for name, count in Counter(launch.family for launch in launches).most_common():
        lines.append(f"| {name} | {count} | {us[name]:.0f} | {formula[name]:.0f} | {us[name] / formula[name]:.2f} |")
    return [*lines, ""]


def _tests(rows: Rows) -> list[str]:
    tests = _select("test", rows)
    counts = Counter(row["outcome"] for row in tests)
    lines = ["- " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))] if tests else []
    reasons = Counter(row.get("reason") for row in tests if row["outcome"] == "skipped")
    lines += [f"- skipped {number}: {reason}" for reason, number in reasons.most_common(3)]
    reasons = Counter(row["error"] for row in tests if row["outcome"] == "uncollected")
    lines += [f"- uncollected {number}: {reason[:160]}" for reason, number in reasons.most_common(3)]
    failed = [row for row in tests if row["outcome"] == "failed"]
    lines += [f"- FAILED {row['test']}: {row['error'][:160]}" for row in failed[:_NAMED]]
    return lines + ([f"- and {len(failed) - _NAMED} more failed"] if len(failed) > _NAMED else [])
