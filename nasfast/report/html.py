"""report.html: one self-contained page from the files of a run directory; it says which stages have not run yet."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nasfast.config import ConfigError, flatten, load_yaml
from nasfast.indicators.table import TABLE_FILE
from nasfast.report import plots
from nasfast.report.findings import (
    Top1,
    advise,
    at_chance,
    compare,
    is_peer,
    other_seeds,
    same_terms,
    score_verdict,
    training_top1,
    trainings,
)
from nasfast.report.page import (
    NotRun,
    escape,
    format_interval,
    html_cards,
    html_details,
    html_table,
    millions,
    percent,
    write_figure,
    write_run_page,
)
from nasfast.report.run_files import RunFiles, config_section, format_limits, limits_origin
from nasfast.search import pareto_front, sample_distinct
from nasfast.search.candidate import ARCHS_FILE
from nasfast.settings import CONFIG_FILE, SPACE_FILE, STABILITY_FILE
from nasfast.spaces import Arch, SearchSpace, format_arch

# Draws of random architectures for the figure of score against MACs; a small space has fewer different ones.
_CLOUD = 1000

_STALE = (
    "The retrained network has another architecture than the best of the present search: run "
    "<code>nasfast retrain</code> again."
)
_USE = """import nasfast

# an nn.Module; model.images has the classes and the preprocessing
model = nasfast.load_model({!r})
# the most probable classes with their probabilities
print(nasfast.classify(model, "photo.jpg"))"""
_LEGEND = (
    "k: size of the convolution kernel. e: hidden channels per input channel (expansion). se: squeeze-and-excitation "
    "with its ratio. skip: the layer is left out. s2: stride 2."
)


def _figure(run: RunFiles, name: str, figure: Figure, caption: str) -> str:
    """Write `report/NAME.svg`, and return the HTML that shows it."""
    return write_figure(figure, caption, run.folder / "report" / f"{name}.svg")


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html`, and its figures under `report/`, from the files that the run directory has.

    A section whose file is absent says which command writes the file; one whose file is damaged says so.

    Raises:
        FileNotFoundError: `run_dir` is not a directory.
    """
    sections = [
        ("summary", "Summary", _summary),
        ("architecture", "Best architecture", _strip),
        ("top", "Architectures of the highest scores", _top_k),
        ("pareto", "Score against cost", _pareto),
        ("indicators", "Indicators", _heatmap),
        ("supernet", "Supernet training", _supernet_curves),
        ("retrain", "Retraining", _retrain),
        ("use", "Use the network", _use),
        ("stability", "Stability between seeds", _stability),
        ("rank", "Rank correlation", _rank),
        ("config", "Configuration", config_section),
        ("environment", "Environment", _environment),
    ]
    return write_run_page(run_dir, "nasfast report", RunFiles, sections)


def _summary(run: RunFiles) -> str:
    result, space = run.result, run.space
    best = result.candidates[0]
    cards: list[tuple[str, str]] = []
    costs = [
        (millions(best.macs), "MACs per image"),
        (millions(best.params), "parameters"),
        *((f"{value:.4g} {t.unit}", t.quantity) for t, value in zip(result.tables, best.values, strict=True)),
        (f"{best.score:.4g}", "score, proven highest within the limits" if best.optimal else "score"),
    ]
    retrained = run.retrained
    trained = retrained.get("best")
    peers = [result for name, result in retrained.items() if is_peer(name)]
    comparison = None
    current = trained is not None and trained["arch"] == list(best.arch)
    if trained is not None and current:
        top1 = Top1.of(trainings("best", retrained))
        spread = f"{top1.spread} {percent(top1.low)} to {percent(top1.high)}"
        cards.append((percent(top1.mean), f"top-1, retrained ({spread})"))
        comparison = compare(trained, peers, other_seeds("best", retrained))
        if comparison is not None:
            mean = "top-1, random" if comparison.peers == 1 else f"mean top-1 of {comparison.peers} random"
            networks = "architecture" if comparison.peers == 1 else "architectures"
            others = Top1.of([peer for peer in peers if same_terms(trained, peer)])
            cards.append((percent(others.mean), f"{mean} {networks} of equal cost"))
    sentences = [
        f"Space {escape(space.name)}: {space.cardinality:.3g} architectures, {len(space)} layers, "
        f"{space.resolution} x {space.resolution} input, {space.num_classes} classes.",
        f"Limits: {escape(format_limits(result))}{escape(f' ({origin})' if (origin := limits_origin(run)) else '')}.",
        *(f"{escape(t.quantity.capitalize())}: {escape(t.about)}." for t in result.tables if t.about),
        f"Best architecture: {escape(space.words(best.arch))} (<code>{escape(format_arch(best.arch))}</code>)",
    ]
    if trained is None:
        sentences.append("Not retrained yet: <code>nasfast retrain</code>.")
    elif not current:
        sentences.append(_STALE)
    elif comparison is not None:
        sentences.append(comparison.sentence("Retrained, it"))
    elif peers:
        sentences.append(
            "The retrained random architectures differ in cost, training or images, so they are not compared: run "
            "<code>nasfast retrain</code> again."
        )
    if best.optimal:
        sentences.append(escape(score_verdict(run.folder)))
    gained = "" if comparison is None else f'<p class="note"><b>{comparison.headline}.</b></p>'
    if comparison is not None:
        sentences.append(f"Next: <code>{escape(advise(comparison, retrained, run.folder, space.num_classes))}</code>.")
    return html_cards([*cards, *costs]) + gained + "".join(f"<p>{s}</p>" for s in sentences)


def _strip(run: RunFiles) -> str:
    figure = plots.architecture_strip(run.space, run.result.candidates[0].arch)
    caption = "Height: output channels (square-root scale). Hue: kernel. Shade: expansion. Arrow: stride."
    return _figure(run, "architecture", figure, caption) + _choices(run.space)


def _choices(space: SearchSpace) -> str:
    """What the numbers of an architecture stand for; layers with the same candidates share rows."""
    layers: dict[tuple[tuple[int, str], ...], list[int]] = {}
    for i, layer in enumerate(space.layers):
        layers.setdefault(tuple((choice, layer.label(choice)) for choice in layer.options), []).append(i)
    rows = [
        [_ranges(numbers) if j == 0 else "", choice, label]
        for options, numbers in layers.items()
        for j, (choice, label) in enumerate(options)
    ]
    table = html_table(["layers", "number", "candidate"], rows, text_columns=(0, 2))
    return f'<p class="soft">{_LEGEND}</p>' + html_details("What each number of an architecture stands for", table)


def _ranges(numbers: Sequence[int]) -> str:
    """`0 to 3, 5` for ascending numbers 0, 1, 2, 3, 5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{low} to {high}" if high > low else str(low) for low, high in zip(starts, ends, strict=True))


def _top_k(run: RunFiles) -> str:
    rows, tables = [], run.result.tables
    for place, c in enumerate(run.result.candidates, 1):
        costs = [millions(c.macs), millions(c.params), *(f"{v:.4g}" for v in c.values)]
        proof = f"highest score (gap {c.gap:.1e})" if c.optimal else f"not proven: {c.status}"
        rows.append([place, f"{c.score:.6g}", *costs, format_arch(c.arch), proof])
    note = (
        "Highest score: no architecture within the limits scores higher, except those listed above it. The gap is the "
        f"distance between its score and the proven bound. {score_verdict(run.folder)}"
    )
    costs = ["MACs", "parameters", *(f"{t.quantity}, {t.unit}" for t in tables)]
    header = ["#", "score", *costs, "architecture", "proof"]
    return html_table(header, rows, text_columns=range(len(costs) + 2, len(header)), note=note)


def _needs_indicators(section: Callable[[RunFiles], str]) -> Callable[[RunFiles], str]:
    """A section that says so if the run's score gives no table of indicators."""

    def checked(run: RunFiles) -> str:
        if not (run.folder / TABLE_FILE).exists() and (run.folder / CONFIG_FILE).exists():
            score = load_yaml(run.folder / CONFIG_FILE).get("score", {})
            if score.get("distill") is False:
                name = escape(str(score["name"]))
                return f"<p>There is no table of scores: {name} scores whole paths during the search.</p>"
        return section(run)

    return checked


@_needs_indicators
def _pareto(run: RunFiles) -> str:
    result, table = run.result, run.table
    front = result.pareto or pareto_front(table, table.space)
    archs = sample_distinct(table.space, _CLOUD)
    caption = "The front is exact: no architecture lies above and to the left of it."
    figure = plots.score_cost(
        [(p.macs * 1e-6, p.score) for p in front],
        [(table.space.cost(a).macs * 1e-6, table.score(a)) for a in archs],
        [(c.macs * 1e-6, c.score) for c in result.candidates],
        label="MACs (millions)",
        limit=None if result.max_macs is None else result.max_macs * 1e-6,
    )
    html = _figure(run, "pareto", figure, caption)
    for i, cost in enumerate(result.tables):
        if cost.pareto:
            points, best = ([(p.values[i], p.score) for p in ps] for ps in (cost.pareto, result.candidates))
            figure = plots.score_cost(points, [], best, label=f"{cost.quantity} ({cost.unit})", limit=cost.maximum)
            origin = f" {cost.quantity}: {cost.about}" if cost.about else ""
            html += _figure(run, f"pareto_{i}", figure, caption + origin)
    return html


@_needs_indicators
def _heatmap(run: RunFiles) -> str:
    table = run.table
    arch = run.result.candidates[0].arch if (run.folder / ARCHS_FILE).exists() else None
    caption = "Scores of the candidates and of the layer indicators. Grey: not a candidate of that layer."
    return _figure(run, "indicators", plots.indicator_heatmap(table, arch), caption)


def _supernet_curves(run: RunFiles) -> str:
    curves = _curves(run, "supernet", ["supernet"], "nasfast supernet")
    top1 = training_top1(run.metrics)
    if top1 is None or not (run.folder / SPACE_FILE).exists() or not at_chance(top1, run.space.num_classes):
        return curves
    return (
        '<p class="note">The supernet\'s training accuracy is at chance, so the ranking does not come from what it '
        "learned. Check the ranking with <code>nasfast rank</code> or by the comparison with random architectures.</p>"
        f"{curves}"
    )


def _retrain(run: RunFiles) -> str:
    results = run.retrained
    tables, costs = _table_costs(run)
    rows = [
        [
            name,
            percent(r["top1"]),
            percent(r["top5"]),
            millions(r["macs"]),
            millions(r["params"]),
            *costs.get(tuple(r["arch"]), ["-"] * len(tables)),
            r["epochs"],
            f"{r['seconds']:,.0f}",
            format_arch(r["arch"]),
        ]
        for name, r in results.items()
    ]
    header = ["network", "top-1", "top-5", "MACs", "parameters", *tables, "epochs", "seconds", "architecture"]
    stages = [s for s in dict.fromkeys(m["stage"] for m in run.metrics) if s.startswith("retrain/")]
    if not results and not stages:
        raise NotRun("`nasfast retrain` writes retrain/*/result.json")
    table = html_table(header, rows, text_columns=(0, len(header) - 1)) if rows else ""
    if "best" in results and (run.folder / ARCHS_FILE).exists():
        # the summary reports a damaged archs.json
        try:
            current = results["best"]["arch"] == list(run.result.candidates[0].arch)
        except ValueError:
            current = True
        if not current:
            table = f'<p class="note">{_STALE}</p>{table}'
    return table + (_curves(run, "retrain", stages, "nasfast retrain") if stages else "")


def _table_costs(run: RunFiles) -> tuple[list[str], dict[Arch, list[str]]]:
    """Headings of the costs by the search's tables, and these costs of the architectures that the search found."""
    try:
        result = run.result
    except (NotRun, ValueError, OSError):
        return [], {}  # the section of this file says so
    costs = {point.arch: [f"{value:.4g}" for value in point.values] for point in result.points}
    return [f"{table.quantity}, {table.unit}" for table in result.tables], costs


def _use(run: RunFiles) -> str:
    results = run.retrained
    if not results:
        raise NotRun("`nasfast retrain` trains a network to use")
    name = "best" if "best" in results else next(iter(results))
    export = shlex.join(["nasfast", "export", "--out", str(run.folder), *([] if name == "best" else ["--name", name])])
    return (
        f"<p>In Python, for a photograph or as a module of your own program:</p>"
        f"<pre>{escape(_USE.format(str(run.folder / 'retrain' / name)))}</pre>"
        "<p>For other programs, as safetensors and ONNX, checked with onnxruntime where that is installed:</p>"
        f"<pre>{escape(export)}</pre>"
        '<p class="soft">The accuracy above is about images like those of the validation set; check it on your own '
        "before you rely on it.</p>"
    )


def _stability(run: RunFiles) -> str:
    folder = run.folder.resolve()
    parent = folder.parent / STABILITY_FILE
    if not (re.fullmatch(r"seed-\d+", folder.name) and parent.exists()):
        run.read_text(CONFIG_FILE, "nasfast run")
        return (
            "<p>This is one seed, so whether others find the same is not known: <code>nasfast run --seeds 3</code> "
            "says so, with another --out, where <code>--seeds</code> takes the settings.</p>"
        )
    stability = json.loads(parent.read_text(encoding="utf-8"))
    agreement = stability["agreement"]
    page = '<a href="../report.html">The page of all seeds</a>'
    if agreement is None:
        return f"<p>This is one of {stability['seeds']} seeds; too few of them are scored to compare. {page}.</p>"
    tau, without = format_interval(agreement["tau"]), ""
    if agreement["learned"] is not None:
        tau, without = format_interval(agreement["learned"]), " without the structural baseline"
    return (
        f"<p>This is one of {stability['seeds']} seeds. Kendall's tau between two seeds is {tau}{without}: the "
        f"ranking is {'stable' if agreement['stable'] else 'not stable'}. {page} has the rest.</p>"
    )


def _curves(run: RunFiles, name: str, stages: Sequence[str], command: str) -> str:
    metrics = run.metrics
    if not any(m["stage"] in stages for m in metrics):
        raise NotRun(f"`{command}` adds its lines to metrics.jsonl")
    caption = "Solid: training batches, averaged in windows. Dashed: validation."
    figure = _figure(run, name, plots.training_curves(metrics, stages), caption)
    speeds = sorted(m["images_per_s"] for m in metrics if m["stage"] in stages and m.get("images_per_s"))
    if not speeds:
        return figure
    settings: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        settings = flatten(load_yaml(run.folder / CONFIG_FILE))
    precision = settings.get("train.precision" if name == "supernet" else "retrain.train.precision")
    number_type = {"fp32": " in float32", "bf16": " in bfloat16 autocast"}.get(str(precision), "")
    # not in the caption, which is in the figure's file: files of equal results are equal
    speed = f"Median speed: {speeds[len(speeds) // 2]:,.0f} images per second{number_type}."
    return f'{figure}<p class="soft">{speed}</p>'


def _rank(run: RunFiles) -> str:
    report = run.read_json("rank.json", "nasfast rank")
    predictors = (report["predictor"], *report["baselines"])
    rows = []
    for row in predictors:
        estimates = [format_interval(row[key]) for key in ("kendall", "spearman", "kendall_within_depth")]
        above = report["above"].get(row["name"])
        rows.append(
            [row["name"], *estimates, format_interval(above) if above else "", *(f"{r:.2f}" for r in row["regret"])]
        )
    budgets = [f"regret, {millions(b)}" for b in report["budgets"]]
    header = ["", "Kendall tau-b", "Spearman rho", "tau within equal depth", "predictor's tau minus it", *budgets]
    note = (
        f"{report['architectures']} architectures; 95 % intervals from {report['resamples']} bootstrap resamples. "
        "Regret: accuracy lost by taking the predictor's favourite under that many MACs."
    )
    note += "".join(f" {row['name']}: {row['undefined']}." for row in predictors if row.get("undefined"))
    return f"<p>{escape(report['verdict'])}</p>" + html_table(header, rows, text_columns=(0,), note=note)


def _environment(run: RunFiles) -> str:
    versions = run.read_json("environment.json", "nasfast run")
    rows = [[key, "; ".join(value) if isinstance(value, list) else str(value)] for key, value in versions.items()]
    return html_details("Versions and machine", html_table(["", ""], rows, text_columns=(0, 1)))
