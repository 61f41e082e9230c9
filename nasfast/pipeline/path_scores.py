"""path_scores.jsonl: the scores of paths of the score stage, so that one that is stopped continues."""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from pathlib import Path

from nasfast.config import ConfigError
from nasfast.data import Loader
from nasfast.indicators.registry import Score
from nasfast.indicators.scores import Evidence
from nasfast.search import History
from nasfast.settings import MACHINE, RunConfig
from nasfast.train.checkpoint import Checkpoint

_FILE = "path_scores.jsonl"


def open_path_scores(
    cfg: RunConfig, score: Score, evidence: Evidence, checkpoint: Checkpoint, *, resume: bool
) -> History:
    """The scores that are known, and the file that keeps new ones; its first line has a digest of what they depend on.

    A file of anything else is begun again, and without `resume` also one that has every path.
    """
    path = cfg.run_dir / _FILE
    scorer = f"{score.name} {_digest(cfg, score, evidence, checkpoint)}"
    try:
        record = History(path, evidence.net.space, scorer=scorer)
        if resume or not record.scores.keys() >= set(evidence.sample()):
            return record
    except ConfigError:  # of other weights, images or settings, or damaged
        pass
    path.unlink()
    return History(path, evidence.net.space, scorer=scorer)


def _digest(cfg: RunConfig, score: Score, evidence: Evidence, checkpoint: Checkpoint) -> str:
    """The digest of all that the score of a path depends on, but for the space, which the file names."""
    sources = [loader.source for loader in (evidence.images, *(evidence.loaders or ())) if isinstance(loader, Loader)]
    data, _ = cfg.data.parted(MACHINE)
    for name in ("train", "val"):
        del data[name]
    depends = {
        "weights": checkpoint.digest if score.trained else [cfg.method, cfg.supernet.to_dict()],
        "images": [[source.name(i), int(source.labels[i])] for source in sources for i in range(len(source))],
        "settings": [data, cfg.seed, cfg.score.images, cfg.recalibration_batches, cfg.train.precision],
        "device": cfg.torch_device,
        "code": _code(score.function.__module__),
    }
    return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def _code(module: str) -> str:
    """The text of a module that has a score, which its user may change; where it is in no file, another each time."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return uuid.uuid4().hex if file is None else Path(file).read_text(encoding="utf-8")
