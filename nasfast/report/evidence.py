"""What a run's results prove: the best architecture against random ones, and how well the score ranks. No torch.

A summary claims a difference only if its interval excludes 0. Beside "highest score" it says how well the score ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from nasfast.search.sampling import EQUAL_COST_TOLERANCE

PROVEN = "proven: no other within the limits has a higher score"
"""Status of the first architecture of an exact search."""

PROVEN_NEXT = "proven: only those above have a higher score"
"""Status of the others."""

_TWO_SIDED = 0.975


@dataclass(frozen=True)
class Comparison:
    """The best architecture compared with random ones of equal cost, on the same images.

    Attributes:
        gain: top-1 of the best minus the mean top-1 of the others, in percentage points.
        low, high: 95 % interval of the gain.
        peers: number of random architectures.
        images: number of images.
    """

    gain: float
    low: float
    high: float
    peers: int
    images: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """The difference, its interval, and what the interval covers."""
        peers = "one random architecture" if self.peers == 1 else f"the mean of {self.peers} random architectures"
        where = "above" if self.gain > 0 else "below" if self.gain < 0 else "away from"
        covers = f"over {self.images:,} images" + (" and the random architectures" if self.peers > 1 else "")
        text = (
            f"Retrained, it is {abs(self.gain):.2f} percentage points {where} {peers} of equal cost "
            f"(95 % interval {self.low:+.2f} to {self.high:+.2f}, {covers})"
        )
        if not self.significant:
            return f"{text}: the difference is not significant."
        if self.peers == 1:
            return (
                f"{text}. This is a difference between these two networks only; others of that cost may be better or "
                "worse. retrain.random_architectures sets how many are retrained."
            )
        return f"{text}: neither the images nor the choice of random architectures explains the difference."


def compare(best: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> Comparison | None:
    """Compare retrained networks on the images on which all of them were evaluated.

    Let d_i = (1 if the best is right on image i, else 0) - (share of the m others that are right), N the number of
    images, and s the standard deviation of the others' accuracies. The interval is

        mean d +- sqrt((z std(d) / sqrt(N))^2 + (t s / sqrt(m))^2),

    where z and t are the 97.5 % quantiles of the normal distribution and of Student's with m - 1 degrees of freedom.
    The first term comes from the images; they are paired, so an image that is hard for all adds nothing. The second
    comes from the architectures and their training, and is unknown for m = 1. The best one was trained once, so neither
    term has the scatter of its own training.

    Args:
        best: `result.json` of a retrained network.
        peers: `result.json` of random architectures; those of another cost or training (`same_terms`) are left out.

    Returns:
        The comparison, or None if no peer is comparable.
    """
    peers = [peer for peer in peers if same_terms(best, peer)]
    if not peers:
        return None
    right = [_right(form) for form in (best, *peers)]
    difference = right[0] - np.mean(right[1:], axis=0)
    images, m = len(difference), len(peers)
    image_term = stats.norm.ppf(_TWO_SIDED) * difference.std(ddof=1) / math.sqrt(images) if images > 1 else math.inf
    arch_term = 0.0
    if m > 1:
        scatter = np.std([hits.mean() for hits in right[1:]], ddof=1)
        arch_term = stats.t.ppf(_TWO_SIDED, m - 1) * scatter / math.sqrt(m)
    gain, half = 100 * float(difference.mean()), 100 * math.hypot(image_term, arch_term)
    return Comparison(gain, gain - half, gain + half, m, images)


def same_terms(best: Mapping[str, Any], peer: Mapping[str, Any]) -> bool:
    """Whether a result can be compared with another: equal cost, equal epochs, evaluated on the same images."""
    near = abs(peer["macs"] - best["macs"]) <= EQUAL_COST_TOLERANCE * best["macs"]
    # results of earlier versions do not record single images; the number of ranks decides the order of images
    recorded = bool(best.get("correct")) and bool(peer.get("correct"))
    return near and recorded and all(peer[key] == best[key] for key in ("epochs", "images", "ranks"))


def _right(form: Mapping[str, Any]) -> np.ndarray:
    """(images,) 1 for images on which the network is right, 0 for the others."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(form["correct"]), dtype=np.uint8), count=form["images"])
    return bits.astype(np.float64)


def is_peer(name: str) -> bool:
    """Whether a retrained network of this name is a random architecture: `random`, `random-2`, ..."""
    return name == "random" or name.startswith("random-")


def worth_of_score(run_dir: str | Path) -> str:
    """What is known about the score that the search maximised: what refined it, or the verdict of `nasfast rank`."""
    refinement = _text_in(Path(run_dir) / "refined.json", "meta", "refinement")
    if refinement is not None:
        return f"The proof is about the score only. {refinement}"
    verdict = _text_in(Path(run_dir) / "rank.json", "verdict")
    if verdict is None:
        return (
            "The proof is about the score only. How well the score ranks trained accuracies was not measured in this "
            "run (nasfast rank measures it, docs/ranking.md says what to expect)."
        )
    return f"The proof is about the score only. How well the score ranks trained accuracies: {verdict}"


def _text_in(path: Path, *keys: str) -> str | None:
    """A text in a JSON file, or None if the file or the text is missing or damaged."""
    try:
        form = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            form = form[key]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return form if isinstance(form, str) else None
