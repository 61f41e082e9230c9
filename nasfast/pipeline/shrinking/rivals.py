"""Networks of about equal cost that the result of `nasfast shrink` is compared with, after the same adaptation."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from nasfast import shrink
from nasfast.pipeline.run import log_stage
from nasfast.pipeline.shrinking.files import RESULT_FILE, clone, read_record, weights_digest, write_record
from nasfast.pipeline.shrinking.int8 import INT8_FILE, int8_answers, write_int8
from nasfast.pipeline.shrinking.material import Material
from nasfast.pipeline.shrinking.models import fit_classifier
from nasfast.pipeline.shrinking.norms import by_norms
from nasfast.pipeline.shrinking.run import SIZE_STEP
from nasfast.pipeline.shrinking.stages import UNIFORM, Made, adapted_network, cut_network, judged, limits_at
from nasfast.pipeline.shrinking.timing import STEP, full_latency, latency_file, network_timer, pixel_share
from nasfast.retrain.export import ONNX_FILE, write_checked_onnx
from nasfast.search import InfeasibleConstraintError, Limits, sample_under
from nasfast.search.limits import layer_costs
from nasfast.seeds import derive_seed
from nasfast.settings import INT8
from nasfast.shrink import Measured
from nasfast.spaces import Arch, LayerSpace, read_cost_table

_LOG = logging.getLogger(__name__)

_DRAWS = 200
"""Random architectures within the limits, of which those that use most of them are taken."""


def rivals(work: Material, record: dict[str, Any], limits: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Name -> result of each network of the comparison."""
    best = record["networks"][0]
    networks = {}
    side = equal_side(work, record, limits)
    if side is None:
        _LOG.info("the full network meets the limits at no lower resolution")
    else:
        found = work.searched(side)
        networks["lower"] = adapted_network(
            work,
            "lower",
            f"full network at {side} px",
            size=side,
            costs=(found.macs, found.params),
            depends={},
            make=lambda: (work.at_size(side), None),
        )
    uniform = uniform_rivals(work, record)
    if not uniform:
        _LOG.info("uniform widths meet the limits at no size, or without being narrowed")
    for number, (size, arch) in enumerate(uniform):
        if (size, arch) != (int(best["size"]), tuple(best["arch"])):
            name, kind = (f"uniform-{size}", f"{UNIFORM}, {size} px") if number else ("uniform", UNIFORM)
            networks[name] = cut_network(work, name, kind, size, arch, partial(work.measured, size))
    for size, arch in uniform[:1]:
        kind = "uniform widths by L1 norms"
        networks["l1"] = cut_network(work, "l1", kind, size, arch, partial(_by_norms, work, size))
    where = int(best["size"])
    for number, arch in enumerate(random_archs(work, record, limits), 1):
        kind = f"random allocation {number}, closed form"
        networks[f"random-{number}"] = cut_network(
            work, f"random-{number}", kind, where, arch, lambda: work.measured(where)
        )
    # what other runtimes take is not comparable
    if work.cfg.int8 and work.cfg.latency_device == "onnx" and (eight := int8_network(work)) is not None:
        networks[INT8] = eight
    if work.cfg.peer is not None:
        networks["peer"] = peer_network(work)
    return networks


def int8_network(work: Material) -> dict[str, Any] | None:
    """The full network in 8-bit integers; None where onnxruntime cannot make it; writes networks/int8/."""
    size, folder, started = work.resolution, work.run.network(INT8), time.monotonic()
    about = {**work.about, "size": size, "bits": 8}
    path, result = folder / INT8_FILE, folder / RESULT_FILE
    if (record := read_record(result, about)) is not None and path.exists() and _digest(path) == record.get("file"):
        return record
    work.run.begin_writing()
    folder.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # of another file
    shown, _ = work.images.read(work.images.train, size, 4)
    try:
        with tempfile.TemporaryDirectory() as other:
            source = Path(other) / ONNX_FILE
            about_images = {"images": work.images.info(size).to_dict()}
            write_checked_onnx(work.teacher, work.images.prepared(shown), source, about_images)
            write_int8(work, size, source, path)
    except RuntimeError as error:
        _LOG.warning("the full network in 8 bits is left out: %s", error)
        return None
    found, after, kind = work.searched(size), int8_answers(work, size, path), "full network in 8 bits"
    log_stage("quantise", started, f"{kind}: top-1 {after.top1:.1%}")
    content = judged(kind, size, (found.macs, found.params), after)
    return write_record(result, about, {**content, "file": _digest(path)})


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def peer_network(work: Material) -> dict[str, Any]:
    """The network that the user names, with a fitted classifier, and adapted by labels and then by the teacher."""
    found, model = work.peer, clone(work.peer.model)

    def make() -> Made:
        fit_classifier(model, work.batches, work.images.classes)
        work.teach(model, work.cfg.teacher_epochs, by_labels=True)  # as the full network was
        return model, None

    return adapted_network(
        work,
        "peer",
        str(work.cfg.peer),
        size=work.resolution,
        costs=(found.macs, found.params),
        depends={"peer": work.cfg.peer, "peer_weights": weights_digest(work.pretrained_peer.model)},
        make=make,
        form=found.model,
    )


def equal_side(work: Material, record: dict[str, Any], limits: dict[str, float]) -> int | None:
    """The side, a multiple of 8, at which the full network costs about as much as the result; None if none does.

    It has as many parameters at each side, so none does where these are limited, or where it runs at one side alone.
    Of a limit in milliseconds it is the largest side that meets it, as measured; otherwise MACs decide. Writes
    lower.json.
    """
    full = work.resolution
    if work.searched(full).params > limits.get("max_params", math.inf):
        return None
    path = work.run.dir / "lower.json"
    if (kept := read_record(path, record["about"])) is None:
        try:
            if "max_latency_ms" in limits:
                side = _side_within(work, limits["max_latency_ms"])
            else:
                share = record["networks"][0]["macs"] / work.searched(full).macs
                side = STEP * round(full * math.sqrt(share) / STEP)
            if SIZE_STEP <= side < full:
                work.searched(side)
        except shrink.ShrinkError as error:
            _LOG.warning("there is no full network at a lower resolution to compare with: %s", error)
            side = 0
        kept = write_record(path, record["about"], {"side": side if SIZE_STEP <= side < full else None})
    return kept["side"]


def _side_within(work: Material, limit: float) -> int:
    """The largest side at which the full network takes at most `limit` ms, or one below the smallest that is tried."""
    share = max(pixel_share(partial(full_latency, work), work.resolution, limit), 0.0)
    timer = network_timer(work)

    def within(side: int) -> bool:
        found = work.searched(side)
        return timer(found, found.full) <= limit

    side = max(SIZE_STEP, min(work.resolution - STEP, STEP * round(work.resolution * math.sqrt(share) / STEP)))
    while side + STEP < work.resolution and within(side + STEP):
        side += STEP
    while side >= SIZE_STEP and not within(side):
        side -= STEP
    return side


def _by_norms(work: Material, size: int) -> Measured:
    return by_norms(work.found(size))


def uniform_rivals(work: Material, record: dict[str, Any]) -> list[tuple[int, Arch]]:
    """Uniform widths at the result's side, and at the side where the search measured them as best, if that is another.

    The full network at a lower resolution, of which no width is narrowed, is another rival.
    """
    measured = sorted((n for n in record["networks"] if n["round"] == 0), key=lambda n: float(n["divergence"]))
    found = {int(n["size"]): tuple(n["arch"]) for n in measured}
    narrowed = [(size, arch) for size, arch in found.items() if arch != work.searched(size).full]
    where = int(record["networks"][0]["size"])
    return [
        *(rival for rival in narrowed if rival[0] == where),
        *(rival for rival in narrowed[:1] if rival[0] != where),
    ]


def random_archs(work: Material, record: dict[str, Any], limits: dict[str, float]) -> list[Arch]:
    """Random architectures of the result's size within limits that use most of them; writes random.json."""
    path, about = work.run.dir / "random.json", {**record["about"], "random_networks": work.cfg.random_networks}
    if (kept := read_record(path, about)) is None:
        size, taken = int(record["networks"][0]["size"]), [tuple(record["networks"][0]["arch"])]
        for number in range(work.cfg.random_networks):
            seed = derive_seed(work.cfg.seed, number)
            choose = partial(_random_arch, work.searched(size).space, seed, frozenset(taken))
            if (arch := within_limits(work, record, size, limits, choose)) is None:
                break
            taken.append(arch)
        kept = write_record(path, about, {"archs": [list(arch) for arch in taken[1:]]})
    return [tuple(arch) for arch in kept["archs"]]


def _random_arch(space: LayerSpace, seed: int, taken: Collection[Arch], bounds: Limits) -> Arch | None:
    """Of random architectures within limits, without those that are taken, the one that uses most; None if none is."""
    rng = random.Random(seed)
    try:
        draws = {sample_under(space, rng, bounds) for _ in range(_DRAWS)}.difference(taken)
    except InfeasibleConstraintError:
        return None
    costs = bounds.costs(space) or [("macs", layer_costs(space, "macs"), 1)]

    def use(arch: Arch) -> float:
        # the limit that is nearest decides
        return max(c.total(arch) / max(1, c.fixed + top) for _, c, top in costs)

    return min(draws, key=lambda arch: (-use(arch), arch), default=None)


def within_limits(
    work: Material,
    record: dict[str, Any],
    size: int,
    limits: dict[str, float],
    choose: Callable[[Limits], Arch | None],
) -> Arch | None:
    """The architecture of a size that is chosen within limits, of which that in milliseconds is met as measured.

    As in the search, what takes longer is chosen again, within a lower limit by the table of latencies.
    """
    if "max_latency_ms" not in limits:
        return choose(limits_at(work, size, limits))
    found = work.searched(size)
    timer, table = network_timer(work), read_cost_table(latency_file(work, size), found.space)
    return shrink.narrowed(
        lambda ms: choose(limits_at(work, size, {**limits, "max_latency_ms": ms})),
        lambda arch: (timer(found, arch), table.cost(arch)),
        limits["max_latency_ms"],
        record["latency_factors"][str(size)],
    )
