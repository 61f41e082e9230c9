"""One page that compares runs: settings that differ, accuracies, agreement of their tables, costs and times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from nasfast.config import flatten, load_yaml
from nasfast.indicators.rank import Estimate, bootstrap_weights, kendall_tau
from nasfast.indicators.table import IndicatorTable
from nasfast.report.evidence import compare, compare_runs, is_peer, repeats_of
from nasfast.report.page import figure_of, millions, page_of, percent, svg_of, table_of
from nasfast.report.plots import SERIES, literal, new_figure
from nasfast.report.run_files import NotRun, RunFiles, body_of, limits_of
from nasfast.runtime.files import write_atomic
from nasfast.runtime.progress import duration
from nasfast.search import sample_under
from nasfast.settings import CHOICES
from nasfast.spaces import SAMPLERS, Arch, format_arch

_MARKERS = "osD^v<>P*X"
# Architectures and bootstrap resamples of the agreement of two tables.
_ARCHITECTURES, _RESAMPLES = 500, 200
_NONE = "-"
# Settings of retraining that do not change how one network is trained.
_NOT_OF_TRAINING = tuple(f"retrain.{name}" for name in CHOICES)


def write_comparison(run_dirs: Sequence[str | Path], page: str | Path) -> Path:
    """Write one page that compares runs.

    What a run does not have is a dash.

    Args:
        run_dirs: at least two run directories.
        page: the page, an HTML file; an existing one is replaced.

    Raises:
        ValueError: fewer than two runs, one twice, or a run of several seeds.
        FileNotFoundError: a run directory does not exist or has no config.yaml.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise ValueError(f"give at least two run directories, each once, got {', '.join(map(str, folders)) or 'none'}")
    for folder in folders:
        if seeds := sorted(path for path in folder.glob("seed-*") if (path / "config.yaml").exists()):
            raise ValueError(
                f"{folder} is a run of --seeds, and its report.html compares its seeds: give single ones of them, such "
                f"as {' '.join(map(str, seeds[:2]))}"
            )
        if not (folder / "config.yaml").exists():
            raise FileNotFoundError(
                f"{folder} is no run directory: it has no config.yaml. One seed of `nasfast run --seeds` is RUN/seed-0"
            )
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = {name: RunFiles(folder) for name, folder in zip(names, folders, strict=True)}
    page = Path(page)
    sections: list[tuple[str, str, Callable[[], str]]] = [
        ("runs", "Runs", partial(_overview, runs)),
        ("accuracies", "Accuracies", partial(_accuracies, runs)),
        ("tables", "Agreement of the tables of scores", partial(_agreement, runs)),
        ("settings", "Settings that differ", partial(_settings, runs)),
    ]
    body = [(key, title, body_of(build)) for key, title, build in sections]
    text = page_of(" / ".join(runs), "nasfast report", body)
    write_atomic(page, text.encode(errors="replace"))
    return page


def _known(read: Callable[[], Any]) -> Any:
    """What a file of a run says, or None where it does not exist or is damaged."""
    try:
        return read()
    except (NotRun, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def _overview(runs: Mapping[str, RunFiles]) -> str:
    columns = [_column(run) for run in runs.values()]
    rows = [[key, *(column.get(key, _NONE) for column in columns)] for key in dict.fromkeys(itertools.chain(*columns))]
    note = (
        "Intervals of accuracies are Wilson's 95 % intervals over the images; they leave out the scatter of another "
        "training. Scores of different spaces, methods or score settings are on different scales: compare them within "
        "one column only. Times are those of the machine that trained, and of the last run of each stage."
    )
    return table_of(["", *runs], rows, text_columns=range(len(runs) + 1), note=note)


def _column(run: RunFiles) -> dict[str, str]:
    """What is known of one run, by the name of the row."""
    found: dict[str, str] = {}
    config = _known(lambda: load_yaml(run.folder / "config.yaml")) or {}
    found |= {key: str(config[key]) for key in ("method", "seed") if key in config}
    if (space := _known(lambda: run.space)) is not None:
        found["space"] = f"{space.name}, {space.cardinality:.3g} architectures"
    if (result := _known(lambda: run.result)) is not None and result.candidates:
        best = result.candidates[0]
        found |= {
            "limits": limits_of(result),
            "best architecture": format_arch(best.arch),
            "score": f"{best.score:.5g}" + (", proven" if best.optimal else ""),
            "MACs": millions(best.macs),
            "parameters": millions(best.params),
        }
        found |= {f"{t.quantity}, {t.unit}": f"{v:.4g}" for t, v in zip(result.tables, best.values, strict=True)}
    retrained = _known(lambda: run.retrained) or {}
    if (trained := retrained.get("best")) is not None:
        found |= _known(partial(_trained, trained, retrained)) or {}
    if (seconds := _known(partial(_supernet_seconds, run, config))) is not None:
        found["time of supernet training"] = duration(seconds)
    if seconds := sum(
        _known(partial(float, form["seconds"])) or 0.0 for form in retrained.values() if "seconds" in form
    ):
        found["time of retraining, all networks"] = duration(seconds)
    return found


def _trained(best: Mapping[str, Any], networks: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    right, images = round(best["top1"] * best["images"]), best["images"]
    low, high = stats.binomtest(right, images).proportion_ci(method="wilson")
    found = {
        "top-1 of the best": f"{percent(best['top1'])} [{100 * low:.2f}, {100 * high:.2f}]",
        "epochs of retraining": str(best["epochs"]),
    }
    against = compare(best, [form for name, form in networks.items() if is_peer(name)], repeats_of("best", networks))
    if against is not None:
        found["above random architectures of equal cost, points"] = _points(against.gain, against.low, against.high)
    return found


def _points(gain: float, low: float, high: float) -> str:
    return f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]"


def _supernet_seconds(run: RunFiles, config: Mapping[str, Any]) -> float:
    """The time of the training steps, from their logged speeds."""
    lines = [m for m in run.metrics if m["stage"] == "supernet" and m.get("images_per_s")]
    if not lines:
        raise NotRun("`nasfast supernet` trains")
    before = [0, *(m["step"] for m in lines)]
    # a speed counts an image once for each path of a step
    images = config["data"]["batch_size"] * _paths_per_step(run, config.get("supernet") or {})
    return sum((m["step"] - b) * images / m["images_per_s"] for m, b in zip(lines, before, strict=False))


def _paths_per_step(run: RunFiles, supernet: Mapping[str, Any]) -> int:
    sampler = SAMPLERS[supernet.get("sampler") or "uniform"]
    return sampler(run.space, layer_indicators=bool(supernet.get("layer_indicators"))).paths_per_step


def _accuracies(runs: Mapping[str, RunFiles]) -> str:
    bests = {name: (_known(partial(getattr, run, "retrained")) or {}).get("best") for name, run in runs.items()}
    if not any(bests.values()):
        raise NotRun("`nasfast retrain` trains networks to compare")
    images = {name: _known(partial(_validation_images, run)) for name, run in runs.items()}
    rows = []
    for one, other in itertools.combinations(runs, 2):
        ours, theirs = bests[one], bests[other]
        if ours is None or theirs is None:
            said = "not both are retrained"
        elif images[one] is None or images[other] is None:
            said = "the images of one are not known"
        elif images[one] != images[other] or any(ours.get(k) != theirs.get(k) for k in ("images", "ranks")):
            said = "evaluated on other images"
        else:
            found = compare_runs([ours], [theirs])
            said = _points(found.gain, found.low, found.high)
            said += "" if found.significant else ": not significant"
            said += (
                ""
                if ours["epochs"] == theirs["epochs"]
                else f"; {ours['epochs']} and {theirs['epochs']} epochs of retraining"
            )
        rows.append([one, other, said])
    note = (
        "Top-1 of the first run's best network minus that of the second, in percentage points, with its 95 % interval "
        "over the images, on which both are compared one by one. One training each: the interval says nothing about "
        "other seeds, for which there is nasfast run --seeds."
    )
    header = ["run", "minus run", "difference of their best networks"]
    caption = "Top-1 of every retrained network against its MACs."
    figure = figure_of(svg_of(_figure(runs), "accuracies", caption), caption)
    return table_of(header, rows, text_columns=(0, 1, 2), note=note) + figure


def _validation_images(run: RunFiles) -> tuple[str, ...]:
    """What decides which images the networks of a run were evaluated on, and their order."""
    config = load_yaml(run.folder / "config.yaml")
    data = config["data"]
    source, val, seed = (data.get(key) for key in ("source", "val", "split_seed"))
    if source not in (None, "folder"):
        return (source,)
    if val is not None:
        return "folder", val
    seed = config["seed"] if seed is None else seed
    return "folder", *(str(value) for value in (data.get("train"), data.get("val_fraction"), seed))


def _figure(runs: Mapping[str, RunFiles]) -> Figure:
    figure, (ax,) = new_figure(8, 4)
    for i, (name, run) in enumerate(runs.items()):
        forms = list((_known(partial(getattr, run, "retrained")) or {}).values())
        points = [(form["macs"] / 1e6, 100 * form["top1"]) for form in forms]
        if points:
            macs, top1 = zip(*points, strict=True)
            colour, marker = SERIES[i % len(SERIES)], _MARKERS[i % len(_MARKERS)]
            ax.scatter(macs, top1, s=40, alpha=0.8, color=colour, marker=marker, label=literal(name))
    ax.set(xlabel="MACs (millions)", ylabel="top-1 (%)")
    ax.legend(fontsize=8, frameon=False)
    return figure


def _agreement(runs: Mapping[str, RunFiles]) -> str:
    tables = {name: _searched_table(run) for name, run in runs.items()}
    samples: dict[str, list[Arch]] = {}
    weights: dict[str, np.ndarray] = {}
    scores: dict[str, list[float]] = {}
    for name, table in tables.items():
        if table is not None:
            space, rng = table.space, random.Random(0)
            if space.fingerprint not in samples:
                drawn = (sample_under(space, rng) for _ in range(_ARCHITECTURES))
                different = samples[space.fingerprint] = list(dict.fromkeys(drawn))
                weights[space.fingerprint] = bootstrap_weights(len(different), _RESAMPLES, 0)
            scores[name] = [table.score(arch) for arch in samples[space.fingerprint]]
    rows = []
    for one, other in itertools.combinations(runs, 2):
        a, b = tables[one], tables[other]
        if a is None or b is None:
            said = "not both have a table"
        elif a.space.fingerprint != b.space.fingerprint:
            said = "tables of different spaces"
        else:
            said = str(Estimate.of(kendall_tau(scores[one], scores[other], weights[a.space.fingerprint])))
        rows.append([one, other, said])
    note = (
        f"Kendall's tau-b over at most {_ARCHITECTURES} different random architectures, with its 95 % bootstrap "
        "interval over them. A high tau says that both rank alike, not that either ranks well: both may only follow "
        "structure."
    )
    return table_of(["run", "and run", "tau"], rows, text_columns=(0, 1, 2), note=note)


def _searched_table(run: RunFiles) -> IndicatorTable | None:
    """The table of scores; None if there is none, or if the last search scored whole paths and left an older one."""
    result = _known(lambda: run.result)
    return None if result is not None and result.scored_with is not None else _known(lambda: run.table)


def _settings(runs: Mapping[str, RunFiles]) -> str:
    forms = [_made_with(run) for run in runs.values()]
    keys = sorted(set().union(*forms) - {"out"})
    rows = [[key, *(form.get(key, _NONE) for form in forms)] for key in keys if len({f.get(key) for f in forms}) > 1]
    if not rows:
        return "<p>All settings are equal.</p>"
    note = f"{len(keys) - len(rows)} other settings are equal. Settings of a stage are those of its result, where "
    note += "config.yaml is newer."
    return table_of(["setting", *runs], rows, text_columns=range(len(runs) + 1), note=note)


def _made_with(run: RunFiles) -> dict[str, str]:
    """The settings that made what the page shows, by their flags, as text."""
    result, table = _known(lambda: run.result), _searched_table(run)
    best = (_known(lambda: run.retrained) or {}).get("best") or {}
    form = flatten(load_yaml(run.folder / "config.yaml"))
    if result is not None and result.settings is not None:
        form |= flatten(result.settings.to_dict(), "search.")
    scored = table.meta.get("settings") if table is not None else result and result.scored_with
    form |= flatten(scored if isinstance(scored, Mapping) else {})
    trained = flatten(best.get("settings") or {}, "retrain.")
    form |= {key: value for key, value in trained.items() if key not in _NOT_OF_TRAINING}
    return {key: str(value) for key, value in form.items()}
