"""report.html of a run of `nasfast shrink`: the result in a sentence, the comparison, and which blocks lost what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nasfast.display import counted
from nasfast.indicators.accuracies import top1_interval
from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.report.findings import Comparison, compare_runs
from nasfast.report.page import (
    NotRun,
    escape,
    html_cards,
    html_details,
    html_table,
    millions,
    percent,
    write_figure,
    write_run_page,
)
from nasfast.report.plots import MARKERS, SERIES, literal, new_figure
from nasfast.report.style import EMPTY
from nasfast.runtime.files import unseal
from nasfast.settings import CONFIG_FILE, FINETUNED, FULL, INT8, SMALL

NETWORKS_FILE = "networks.json"
"""Which networks the last run of `nasfast shrink` compared."""

_NOT_YET = "`nasfast shrink --resume` writes it"
"""What a section without its files says."""

_ABOUT = 1.02
"""Costs of at most so many times another count as equal."""

_WIDE = 1.5
"""Points of half an interval from which a reader is told that there are few images."""

_FAR = 0.15
"""Top-1 by which a network may be below the result in the picture, which would show no differences otherwise."""


class ShrinkFiles:
    """The files of a run, each read when a section asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def record(self, name: str) -> dict[str, Any]:
        """A record; NotRun if it is not there."""
        path = self.folder / name
        if not path.exists():
            raise NotRun(_NOT_YET)
        return unseal(path.read_text(encoding="utf-8"))

    @cached_property
    def search(self) -> dict[str, Any]:
        return self.record("search.json")

    @cached_property
    def networks(self) -> dict[str, dict[str, Any]]:
        """Name -> result of each network of the last run, the full one and the result first."""
        return {name: self.record(f"networks/{name}/result.json") for name in self.record(NETWORKS_FILE)["names"]}

    @cached_property
    def times(self) -> dict[str, dict[str, float]]:
        """Name -> median, 20 % and 80 % quantile of the milliseconds of each network; none before they are timed."""
        path = self.folder / "times.json"
        return self.record("times.json")["networks"] if path.exists() else {}

    @cached_property
    def is_timed_in_int8(self) -> bool:
        """Whether all were timed in 8 bits, and not the one network that is in 8 bits alone."""
        return bool(self.times) and self.record("times.json")["about"].get("dtype") == "int8"

    @cached_property
    def runtime(self) -> str:
        """What was timed, and where."""
        return str(self.record("times.json")["about"]["runtime"]) if self.times else ""

    def exported(self, name: str) -> list[dict[str, Any]]:
        """The files that were exported of a network; none where those of another one are there."""
        path = f"export/{'' if name == SMALL else f'{name}/'}export.json"
        if not (self.folder / path).exists():
            return []
        record, about = self.record(path), self.networks[name]["about"]
        same = all(record["about"].get(key) == about.get(key) for key in ("size", "arch"))
        return list(record["files"]) if same else []

    def difference(self, name: str, of: str = SMALL) -> Comparison:
        """The top-1 of a network, by default the result, minus that of another, on the same images."""
        return compare_runs([self.networks[of]], [self.networks[name]])


def headline(record: Mapping[str, Any], files: ShrinkFiles, name: str = SMALL) -> str:
    """The result in one sentence, or its copy of another name."""
    small, full = files.networks[name], files.networks[FULL]
    if name in files.times and FULL in files.times:
        costs = f"{files.times[name]['median_ms']:.2f} ms instead of {files.times[FULL]['median_ms']:.2f}"
        costs += " in 8 bits" if files.is_timed_in_int8 else ""
    else:
        costs = f"{millions(small['macs'])} MACs instead of {millions(full['macs'])}"
    d = files.difference(FULL, name)
    side = f"{abs(d.gain):.1f} points {'less' if d.gain <= 0 else 'more'}"
    # rounding may leave -0.0, which 0 is added to
    low, high = (round(v, 1) + 0.0 for v in sorted((-d.low, -d.high) if d.gain <= 0 else (d.low, d.high)))
    kind = " in float32" if files.is_timed_in_int8 else ""
    interval = f"95 % interval {low:.1f} to {high:.1f}, {d.images:,} images"
    return (
        f"{costs}, at {side} ({interval}): {percent(small['top1'])} instead of {percent(full['top1'])}{kind}; as "
        f"measured, the best of {len(record['networks'])} networks: uniform widths, and those that are proven the best "
        f"of {record['cardinality']:.2g} by the tables."
    )


def write_shrink_report(run_dir: str | Path) -> Path:
    """Write report.html from the files of a run."""
    sections = [
        ("summary", "Summary", _summary),
        ("comparison", "At equal cost", _comparison),
        ("blocks", "What was cut", _blocks),
        ("search", "Search", _search),
        ("files", "Exported files", _exported),
        ("config", "Configuration", _config),
    ]
    return write_run_page(run_dir, "nasfast shrink", ShrinkFiles, sections)


def _summary(files: ShrinkFiles) -> str:
    small, full = files.networks.get(SMALL), files.networks.get(FULL)
    if small is None or full is None:
        raise NotRun(_NOT_YET)
    cards = [
        (percent(small["top1"]), f"top-1 ({percent(full['top1'])} of the full network)"),
        (millions(small["macs"]), f"MACs per image ({millions(full['macs'])})"),
        (millions(small["params"]), f"parameters ({millions(full['params'])})"),
        (f"{small['size']} px", f"images ({full['size']} px)"),
    ]
    if SMALL in files.times:
        ms = {name: files.times[name]["median_ms"] for name in (SMALL, FULL)}
        cards.insert(1, (f"{ms[SMALL]:.2f} ms", f"{files.runtime} ({ms[FULL]:.2f} ms)"))
    notes = [f'<p class="note">{escape(note)}</p>' for note in verdicts(files)]
    return f"<p><b>{escape(headline(files.search, files))}</b></p>{html_cards(cards)}{''.join(notes)}"


def verdicts(files: ShrinkFiles) -> list[str]:
    """What a reader should know before he takes the result: what more training gives, what is no worse, how few images
    there are, and what 8 bits give."""
    notes, limits = [], files.search["about"]["limits"]
    if files.networks[SMALL]["kind"].startswith("uniform"):
        after = " after adaptation" if "adapted" in files.search["networks"][0] else ""
        notes.append(
            f"The result has uniform widths: on held-out images no network of the exact program was better{after}."
        )
    if FINETUNED in files.networks:
        record, d = files.networks[FINETUNED], files.difference(SMALL, FINETUNED)
        notes.append(
            f"With all weights trained for {counted(record['about']['epochs'], 'epoch')} more it has "
            f"{percent(record['top1'])}: {d.gain:+.1f} points ({d.low:+.1f} to {d.high:+.1f}). No other network here "
            "had this training."
        )
    for name, record in files.networks.items():
        costs = {"max_macs": record["macs"], "max_params": record["params"]}
        within = all(costs[limit] <= _ABOUT * limits.get(limit, math.inf) for limit in costs)
        d = files.difference(name)
        if (
            name in (FULL, SMALL, FINETUNED, INT8)
            or not within
            or d.gain > 0
            or _cost(files, name) > _ABOUT * _cost(files, SMALL)
        ):
            continue
        advice = "the search gains nothing here" if name.startswith("random") else "take that one, which is simpler"
        notes.append(
            f"{record['kind']} is {'better' if d.high < 0 else 'no worse'} at this cost ({percent(record['top1'])} "
            f"against {percent(files.networks[SMALL]['top1'])}): {advice} (networks/{name})."
        )
    d = files.difference(FULL)
    if (width := (d.high - d.low) / 2) > _WIDE:
        notes.append(
            f"{d.images:,} images tell the result and the full network apart only from about {width:.0f} points on."
        )
    return notes + _in_8_bits(files)


def _in_8_bits(files: ShrinkFiles) -> list[str]:
    """What 8 bits give alone, and with the cut."""
    if INT8 not in files.times:
        return []
    ms, alone = files.times[INT8]["median_ms"], files.networks[INT8]["top1"]
    text = f"In 8 bits the full network takes {ms:.2f} ms, with {percent(alone)} (networks/{INT8})"
    for row in files.exported(SMALL):
        if "top1" in row:  # the result in 8 bits
            text += f", and the result {row['ms']:.2f} ms, with {percent(row['top1'])} (export/{row['file']})"
    if files.is_timed_in_int8:
        return [f"{text}."]
    if ms <= _ABOUT * _cost(files, SMALL) and alone >= files.networks[SMALL]["top1"]:
        text += ". If you deploy in 8 bits, they are better than the cut at this cost, and a run"
    else:
        text += ". If you deploy in 8 bits, a run"
    return [f"{text} with --latency_dtype int8 cuts for what is still too slow then."]


def _cost(files: ShrinkFiles, name: str) -> float:
    return files.times[name]["median_ms"] if name in files.times else float(files.networks[name]["macs"])


def _comparison(files: ShrinkFiles) -> str:
    rows = []
    timed = bool(files.times)
    for name, record in files.networks.items():
        low, high = top1_interval(record["top1"], record["images"])
        cells = [
            record["kind"],
            f"{record['size']}",
            millions(record["macs"]),
            millions(record["params"]),
            *([f"{files.times[name]['median_ms']:.2f}" if name in files.times else "-"] if timed else []),
            "-" if record["before"] is None else percent(record["before"]),
            f"{percent(record['top1'])} ({100 * low:.1f} to {100 * high:.1f})",
        ]
        if name == SMALL:
            cells.append("")
        else:
            d = files.difference(name)
            cells.append(f"{d.gain:+.1f} ({d.low:+.1f} to {d.high:+.1f})")
        rows.append(cells)
    header = ["network", "pixels", "MACs", "parameters", *(["ms"] if timed else []), "top-1 before", "top-1"]
    header.append("the result is better by")
    small = files.networks[SMALL]
    note = (
        "The full network is the teacher: the labels taught it, without the images on which the search compares "
        "networks. Every other network that is not in 8 bits had the same adaptation: scale and shift of BatchNorms "
        "and the classifier, by the same views of all images and this teacher. 'Before' is right after the cut; the "
        "full network at another side was adapted to it before, and that of which all weights train had this "
        f"adaptation. Every 'before' is on {small['before_images']:,} images. Intervals of 95 %: of a top-1 over the "
        "images, of a difference over the same images in pairs; other seeds of the training are not in them. "
        "Validation images had no part in the search."
    )
    if INT8 in files.networks:
        note += " In 8 bits the full network is onnxruntime's, with ranges from training images."
    if "peer" in files.networks:
        note += f" {files.networks['peer']['kind']} learns from the teacher's logits, and not from its features."
    if timed:
        note += f" Milliseconds: {files.runtime}."
    if files.is_timed_in_int8:
        note += " The top-1 of a network that is not in 8 bits is that in float32."
    return _scatter(files) + html_table(header, rows, text_columns=[0], note=note)


def _scatter(files: ShrinkFiles) -> str:
    figure, (axes,) = new_figure(8, 3.8)
    least = files.networks[SMALL]["top1"] - _FAR
    drawn = {name: record for name, record in files.networks.items() if record["top1"] >= least}
    for i, (name, record) in enumerate(drawn.items()):
        low, high = (100 * bound for bound in top1_interval(record["top1"], record["images"]))
        value, cost = 100 * record["top1"], _cost(files, name) / (1 if files.times else 1e6)
        colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
        around, label = [[value - low], [high - value]], literal(record["kind"])
        axes.errorbar(cost, value, around, fmt=marker, ms=7, color=colour, capsize=3, label=label)
    axes.set(xlabel=f"ms ({files.runtime})" if files.times else "MACs (M)", ylabel="top-1 (%)")
    axes.set_xlim(left=0)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    caption = "Top-1 on the validation images against cost, with intervals of 95 %."
    if below := [f"{r['kind']} ({percent(r['top1'])})" for name, r in files.networks.items() if name not in drawn]:
        caption += f" Below the picture: {', '.join(below)}."
    return write_figure(figure, caption, files.folder / "report" / "comparison.svg")


def _blocks(files: ShrinkFiles) -> str:
    best = files.search["networks"][0]
    table = IndicatorTable.load(files.folder / f"size-{best['size']}" / TABLE_FILE)
    rows, all_macs = [], []
    for i, (value, scores) in enumerate(zip(best["arch"], table.scores, strict=True)):
        layer = table.space.layers[i]
        full = max(scores)
        macs = layer.operator(value).cost.macs, layer.operator(full).cost.macs
        all_macs.append(macs)
        kept = layer.label(value) if value == full or not macs[0] else f"{layer.label(value)} of {layer.label(full)}"
        share = f"{macs[0] / macs[1]:.0%}" if macs[1] else "-"
        rows.append([table.space.rows[i], kept, share, f"{-scores[value]:.4f}"])
    note = (
        "Widths are channels of the hidden dimensions of a block. The loss is the KL divergence to the full network "
        "in nats per image if this choice alone is made. Uniform widths are rounded to those that are searched."
    )
    drawing = _kept_macs(files.folder, [row[0] for row in rows], all_macs)
    return drawing + html_table(["part", "channels", "of its MACs", "loss"], rows, text_columns=[0, 1], note=note)


def _kept_macs(folder: Path, names: Sequence[str], macs: Sequence[tuple[int, int]]) -> str:
    """A drawing of the MACs of each part, kept and in the full network."""
    figure, (axes,) = new_figure(max(6, 2 + 0.35 * len(names)), 3)
    kept, full = ([number / 1e6 for number in numbers] for numbers in zip(*macs, strict=True))
    axes.bar(range(len(names)), full, color=EMPTY, label="full network")
    axes.bar(range(len(names)), kept, color=SERIES[0], label="kept")
    axes.set_xticks(range(len(names)), map(literal, names), fontsize=8, rotation=45, ha="right")
    axes.set_ylabel("MACs (M)")
    axes.legend(fontsize=8, frameon=False)
    caption = "MACs of each part, at the result's side of the images: a block without a blue bar is dropped."
    return write_figure(figure, caption, folder / "report" / "blocks.svg")


def _search(files: ShrinkFiles) -> str:
    networks = files.search["networks"][:16]
    adapted = any("adapted" in n for n in networks)
    rows = [
        [
            *(i, f"{n['size']} px", millions(n["macs"]), f"{n['predicted']:.4f}", f"{n['divergence']:.4f}"),
            *([f"{n['adapted']:.4f}" if "adapted" in n else "-"] if adapted else []),
            n["round"],
        ]
        for i, n in enumerate(networks, 1)
    ]
    note = (
        "Networks that were measured as wholes, best first: cross entropy on "
        f"{files.search.get('held_out', '')} training images that nothing was fitted to, at the best factor of the "
        "logits. By the table it is that of the full network at this side and the sum of the losses. The proof is "
        "about the sum; the order is measured. Of round 0 are uniform widths."
    )
    if adapted:
        note += " The best of each side are compared after adaptation."
    header = ["", "images", "MACs", "by the table", "measured", *(["adapted"] if adapted else []), "round"]
    return html_table(header, rows, text_columns=[], note=note)


def _exported(files: ShrinkFiles) -> str:
    folders = {SMALL: "", FINETUNED: f"{FINETUNED}/"}
    rows = [
        [folder + f["file"], f"{f['bytes'] / 1e6:.1f} MB", f"{f['ms']:.2f}" if f.get("ms") else "-", f.get("note", "")]
        for name, folder in folders.items()
        if name in files.networks
        for f in files.exported(name)
    ]
    if not rows:
        raise NotRun(_NOT_YET)
    return html_table(["file", "size", "ms", ""], rows, text_columns=[0, 3])


def _config(files: ShrinkFiles) -> str:
    path = files.folder / CONFIG_FILE
    if not path.exists():
        raise NotRun(_NOT_YET)
    return html_details("All settings", f"<pre>{escape(path.read_text(encoding='utf-8'))}</pre>")
