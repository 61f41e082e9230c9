"""The stages of `nasfast shrink`: from a pretrained network and images to a smaller one. Files in, files out.

adapt -> teacher.safetensors   measure -> size-N/   search -> search.json   cut, train, evaluate -> networks/NAME/
time -> times.json   page -> report.html   export -> export/
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nasfast import shrink
from nasfast.config import ConfigError
from nasfast.display import Tabular
from nasfast.pipeline.run import log_stage
from nasfast.pipeline.shrinking.files import (
    RESULT_FILE,
    clone,
    load_network,
    read_record,
    save_network,
    write_record,
)
from nasfast.pipeline.shrinking.images import Answers, answers, spread
from nasfast.pipeline.shrinking.material import Material
from nasfast.pipeline.shrinking.run import ShrinkConfig, ShrinkRun, choose_sizes
from nasfast.pipeline.shrinking.timing import (
    full_latency,
    latency_file,
    measure_latency,
    network_timer,
    network_times,
    pixel_share,
)
from nasfast.runtime.device import use_threads
from nasfast.runtime.files import CheckpointError, answers_to_hex
from nasfast.search import InfeasibleConstraintError, Limits
from nasfast.search.limits import read_limits
from nasfast.settings import FINETUNED, FULL, SMALL, SearchConfig
from nasfast.shrink import Found, Measured, Shrunk
from nasfast.shrink.recipe import RECIPE_FILE

_LOG = logging.getLogger(__name__)

SEARCH_FILE = "search.json"
# least share of pixels that a limit in ms gives: most of the time may not depend on them
_LEAST_SHARE = 0.1
BEFORE_IMAGES = 1000
"""Most validation images that a network is judged by before its adaptation."""

PROGRAM, UNIFORM = "exact program", "uniform widths, closed form"
"""Kinds of networks: what the search finds, and the simple answer that it begins with."""


@dataclass(frozen=True, repr=False)
class ShrinkResult(Tabular):
    """What `shrink` returns.

    Attributes:
        networks: name -> result.json of each network: the result, the full network, and those of the comparison.
        headline: the result in one sentence.
        verdicts: simpler networks that are no worse, what few images tell, and what 8 bits give, each in a sentence.
        report: path of report.html.
        files: what was exported.
    """

    networks: dict[str, dict[str, Any]]
    headline: str
    verdicts: tuple[str, ...]
    report: Path
    files: tuple[Path, ...]

    @property
    def caption(self) -> str:
        return self.headline

    def records(self) -> list[dict[str, Any]]:
        """One row per network."""
        return [
            {
                "network": record["kind"],
                "pixels": record["size"],
                "MACs": record["macs"],
                "params": record["params"],
                "before": "-" if record["before"] is None else f"{record['before']:.1%}",
                "top-1": f"{record['top1']:.1%}",
            }
            for record in self.networks.values()
        ]


def shrink_network(cfg: ShrinkConfig, *, resume: bool = False) -> ShrinkResult:
    """Find, cut and adapt a smaller network of a pretrained one; `nasfast shrink`.

    Args:
        cfg: the settings.
        resume: whether to go on in a directory that has a run; finished stages are not repeated.

    Raises:
        ConfigError, DataError, ShrinkError: the settings, the images or the network cannot be used.
        InfeasibleConstraintError: no network meets the limits.
        FileExistsError, CheckpointError, RunDirectoryError: see `ShrinkRun.open`.
    """
    cfg.check_begins()
    with ShrinkRun.open(cfg, resume=resume) as run:
        return every_stage(run)


def every_stage(run: ShrinkRun) -> ShrinkResult:
    """All stages in order; those whose files are there for the same settings are not repeated."""
    from nasfast.pipeline.shrinking.exporting import export
    from nasfast.pipeline.shrinking.rivals import rivals
    from nasfast.report.shrinking import (  # imports matplotlib
        NETWORKS_FILE,
        ShrinkFiles,
        headline,
        verdicts,
        write_shrink_report,
    )

    use_threads(run.cfg.threads)
    work = Material(run)
    work.check()
    full_ms = partial(full_latency, work)
    costs = full_costs(work, full_ms)
    limits = absolute_limits(work, costs)
    record = search(work, sizes_of(work, costs, limits, lambda size: limits_at(work, size, limits), full_ms), limits)
    networks = {FULL: full_network(work), SMALL: small_network(work, record["networks"][0])}
    if run.cfg.finetune == "all":
        networks[FINETUNED] = finetuned_network(work, networks[SMALL])
    if run.cfg.comparison:
        networks |= rivals(work, record, limits)
    network_times(work, networks)
    write_record(run.dir / NETWORKS_FILE, work.about, {"names": list(networks)})
    written = ShrinkFiles(run.dir)
    files: tuple[Path, ...] = ()
    for name in [n for n in (SMALL, FINETUNED) if n in networks and run.cfg.export]:
        files += export(work, name, networks[name], headline(record, written, name))
    sentence = headline(record, written)
    return ShrinkResult(networks, sentence, tuple(verdicts(written)), write_shrink_report(run.dir), files)


def full_costs(work: Material, full_ms: Callable[[int], float]) -> dict[str, float]:
    """What the full network costs at its own size, by the names of the limits that are set.

    Args:
        work: the material.
        full_ms: gives its milliseconds at a side.
    """
    found = work.searched(work.resolution)
    costs = {
        "max_macs": lambda: found.macs,
        "max_params": lambda: found.params,
        "max_latency_ms": lambda: full_ms(work.resolution),
    }
    return {name: costs[name]() for name in work.cfg.bounds}


def absolute_limits(work: Material, costs: dict[str, float]) -> dict[str, float]:
    """The limits in MACs, parameters and ms, by the names of their settings.

    Raises:
        ConfigError: the full network, of these costs, meets all of them.
    """
    limits = {name: bound.absolute(costs[name]) for name, bound in work.cfg.bounds.items()}
    idle = [
        f"{name}={limit:,.10g} is not below the {costs[name]:,.10g} of the full network"
        for name, limit in limits.items()
        if limit >= costs[name]
    ]
    if len(idle) == len(limits):
        raise ConfigError(f"{' and '.join(idle)}, so nothing would be cut: lower it")
    for text in idle:
        _LOG.warning("%s", text)
    return limits


def sizes_of(
    work: Material,
    costs: dict[str, float],
    limits: dict[str, float],
    limits_of: Callable[[int], Limits],
    full_ms: Callable[[int], float],
) -> tuple[int, ...]:
    """The sides of images that are searched, largest first: those of `cfg.sizes` where some network meets the limits.

    Without `cfg.sizes`, it is the first such side of `_sizes_by_limits`.

    Args:
        work: the material.
        costs: those of the full network.
        limits: from `absolute_limits`.
        limits_of: the limits in the space of a size.
        full_ms: milliseconds of the full network at a side.

    Raises:
        ConfigError: a side is larger than the images.
        InfeasibleConstraintError: none meets them at any size.
    """
    sizes = work.cfg.sizes or _sizes_by_limits(work.searched(work.resolution), costs, limits, full_ms)
    if (largest := max(sizes)) > work.resolution:
        raise ConfigError(f"sizes has {largest} pixels, and images have {work.resolution}: raise --resolution to it")
    possible, errors = [], []
    for size in sorted(set(sizes), reverse=True):
        work.check_samples(size)
        try:
            limits_of(size).check(work.searched(size).space)
            possible.append(size)
            if not work.cfg.sizes:
                break
        except InfeasibleConstraintError as error:
            errors.append(error)
    if not possible:
        typed = {name: b.value for name, b in work.cfg.bounds.items() if not b.share and b.value <= 100}
        typed.pop("max_latency_ms", None)
        shared = [f"{name} {value if value >= 1 else 100 * value:g}%" for name, value in typed.items()]
        hint = f"; a share of the full network has a sign: {', '.join(shared)}" if shared else ""
        raise InfeasibleConstraintError(
            f"{errors[-1]}: --sizes has the sides that are searched, --model the network{hint}"
        )
    return tuple(possible)


def _sizes_by_limits(
    found: Found, costs: dict[str, float], limits: dict[str, float], full_ms: Callable[[int], float]
) -> tuple[int, ...]:
    """Sides, of which the first is the one to search, by the share of pixels at which the full network would meet the
    limits.
    """
    resolution, stride = found.space.resolution, found.stride
    # parameters do not depend on the size
    shares = {name: min(1.0, limit / costs[name]) for name, limit in limits.items() if name != "max_params"}
    if "max_latency_ms" in shares:
        share = pixel_share(full_ms, resolution, limits["max_latency_ms"])
        shares["max_latency_ms"] = min(1.0, max(_LEAST_SHARE, share))
    return choose_sizes(resolution, min(shares.values()), stride) if shares else (resolution,)


def limits_at(work: Material, size: int, limits: dict[str, float]) -> Limits:
    """The limits in the space of a size, with its table of latencies."""
    table = None
    if "max_latency_ms" in limits:
        measure_latency(work, size)
        table = str(latency_file(work, size))
    config = SearchConfig.from_dict({**limits, "latency_table": table})
    return read_limits(config, work.searched(size).space)


def search(work: Material, sizes: tuple[int, ...], limits: dict[str, float]) -> dict[str, Any]:
    """The best networks within limits over all sizes, as measured; writes search.json."""
    path, cfg = work.run.dir / SEARCH_FILE, work.cfg
    settings = {"top_k": cfg.top_k, "rounds": cfg.rounds}
    about = {**work.about, "limits": limits, "sizes": list(sizes), **settings}
    if (record := read_record(path, about)) is not None:
        return record
    work.run.begin_writing()
    measured = [work.measured(size) for size in sizes]
    held, started = [work.sample(size)[1] for size in sizes], time.monotonic()
    tables = [latency_file(work, size) for size in sizes] if "max_latency_ms" in limits else None
    timer = None if tables is None else network_timer(work)
    options: dict[str, Any] = {"latency_tables": tables, "latency": timer, **settings, **limits}
    best = shrink.search_measured(measured, held, work.reference, **options)
    record = write_record(
        path,
        about,
        {
            "networks": adapted_first(work, [_shrunk_record(b) for b in best], dict(zip(sizes, held, strict=True))),
            "held_out": len(held[0]),
            "latency_factors": dict(zip(map(str, sizes), best.latency_factors, strict=True)),
            "cardinality": math.fsum(m.found.space.cardinality for m in measured),
            "full": {"macs": work.searched(work.resolution).macs, "params": work.searched(work.resolution).params},
            "searched": [str(work.searched(work.resolution).caption)],
        },
    )
    first = record["networks"][0]
    text = f"{len(best)} networks measured; the best has {first['size']} px and {first['macs']:,} MACs"
    log_stage("search", started, text)
    return record


def adapted_first(work: Material, networks: list[dict[str, Any]], held: Mapping[int, Tensor]) -> list[dict[str, Any]]:
    """Measured networks, best first; of several sizes, the best of each come first, by their loss after adaptation.

    Adaptation makes up for what is cut, and hardly for a lower resolution: before it, small images look too good. The
    held-out images of each size, on which networks are compared, have no part in it.
    """
    # whose logits are not finite cannot be adapted
    best = {network["size"]: network for network in reversed(networks) if math.isfinite(network["divergence"])}
    if len(best) < 2:
        return networks
    for size, network in best.items():
        measured, arch = work.measured(size), tuple(network["arch"])
        model = clone(shrink.cut(measured, arch))
        kept = work.kept_features(shrink.make_recipe(measured, arch))
        work.teach(model, work.cfg.epochs, size=size, kept=kept)
        network["adapted"] = work.held_out_loss(model, held[size])
    finalists = sorted(best.values(), key=lambda network: network["adapted"])
    return [*finalists, *(network for network in networks if "adapted" not in network)]


def _shrunk_record(shrunk: Shrunk) -> dict[str, Any]:
    return {
        "size": shrunk.measured.found.space.resolution,
        "arch": list(shrunk.arch),
        "macs": shrunk.macs,
        "params": shrunk.params,
        "predicted": shrunk.predicted,
        "divergence": shrunk.divergence,
        "predicted_ms": shrunk.predicted_ms,
        "latency_ms": shrunk.latency_ms,
        "round": shrunk.round,
    }


Made = tuple[nn.Module, shrink.Recipe | None]
"""A network before its adaptation, and its recipe."""


def adapted_network(
    work: Material,
    name: str,
    kind: str,
    *,
    size: int,
    costs: tuple[int, int],
    depends: dict[str, Any],
    make: Callable[[], Made],
    form: nn.Module | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A network, adapted by the lesson if it has epochs, and evaluated on the validation images; writes networks/NAME/.

    Args:
        work: the material.
        name: of its folder.
        kind: what it is, for tables.
        size: side of its images in pixels.
        costs: MACs and parameters.
        depends: what tells it from others of this name.
        make: makes the network.
        form: a network of its form, if it is not made of the full network.
        options: of its training, in place of those of the adaptation that all have; see `Material.teach`. With
            epochs=0 it is only evaluated.
    """
    folder, started = work.run.network(name), time.monotonic()
    about = {**work.about, "size": size, **depends}
    if (record := read_record(folder / RESULT_FILE, about)) is not None:
        try:
            load_network(folder, form or work.form)
            return record
        except (OSError, ValueError, RuntimeError, CheckpointError):
            _LOG.warning("%s is damaged: it is made again", folder)
    work.run.begin_writing()
    model, recipe = make()
    model = clone(model)
    before, losses = None, list[float]()
    if epochs := options.pop("epochs", work.cfg.epochs):
        before = answers(model, work.images, spread(work.val(size), BEFORE_IMAGES))
        # a network of another form has other features
        kept = work.kept_features(recipe) if form is None else None
        losses = work.teach(model, epochs, size=size, kept=kept, all_images=True, **options)
    after = answers(model, work.images, work.val(size))
    for file in (RESULT_FILE, RECIPE_FILE):  # those of another network, which the new weights are not of
        (folder / file).unlink(missing_ok=True)
    save_network(folder, model, recipe, about)
    changed = "" if before is None else f"{before.top1:.1%}, after adaptation "
    log_stage("adapt", started, f"{kind}: top-1 {changed}{after.top1:.1%}")
    return write_record(folder / RESULT_FILE, about, {**judged(kind, size, costs, after, before), "losses": losses})


def judged(
    kind: str, size: int, costs: tuple[int, int], after: Answers, before: Answers | None = None
) -> dict[str, Any]:
    """What result.json says of a network; see `adapted_network`."""
    return {
        "kind": kind,
        "size": size,
        "macs": costs[0],
        "params": costs[1],
        "before": None if before is None else before.top1,
        "before_images": 0 if before is None else len(before.right),
        "top1": after.top1,
        "correct": answers_to_hex(after.right),
        "images": len(after.right),
    }


def full_network(work: Material) -> dict[str, Any]:
    """The full network: the teacher, which the adaptation of the others hardly changes (docs/shrink.md)."""
    found = work.searched(work.resolution)
    return adapted_network(
        work,
        FULL,
        "full network",
        size=work.resolution,
        costs=(found.macs, found.params),
        depends={"epochs": 0},
        make=lambda: (work.teacher, None),
        epochs=0,
    )


def cut_network(
    work: Material, name: str, kind: str, size: int, arch: tuple[int, ...], measured: Callable[[], Measured]
) -> dict[str, Any]:
    """The network of an architecture, cut and adapted."""
    cost = work.searched(size).space.cost(arch)

    def make() -> Made:
        of = measured()
        return shrink.cut(of, arch), shrink.make_recipe(of, arch)

    return adapted_network(
        work, name, kind, size=size, costs=(cost.macs, cost.params), depends={"arch": list(arch)}, make=make
    )


def small_network(work: Material, best: dict[str, Any]) -> dict[str, Any]:
    """The result of the search, cut and adapted."""
    size, arch = int(best["size"]), tuple(best["arch"])
    kind = UNIFORM if best["round"] == 0 and arch != work.searched(size).full else PROGRAM
    return cut_network(work, SMALL, kind, size, arch, lambda: work.measured(size))


def finetuned_network(work: Material, small: dict[str, Any]) -> dict[str, Any]:
    """The result, of which all weights train after its adaptation."""
    size, cfg = int(small["size"]), work.cfg

    def make() -> Made:
        recipe = shrink.make_recipe(work.measured(size), tuple(small["about"]["arch"]))
        return load_network(work.run.network(SMALL), work.form), recipe

    return adapted_network(
        work,
        FINETUNED,
        f"{small['kind']}, all weights trained",
        size=size,
        costs=(small["macs"], small["params"]),
        depends={"arch": small["about"]["arch"], "epochs": cfg.finetune_epochs, "lr": cfg.finetune_lr},
        make=make,
        train="all",
        epochs=cfg.finetune_epochs,
        lr=cfg.finetune_lr,
        lr_classifier=cfg.finetune_lr,
    )
