"""What a score is computed from: the images and the supernet of a run's settings. All of this needs torch.

Functions that need only the space take it, because the tables of limits may be gone by then.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, ImageSource, Loader, make_loader, make_loaders, random_subset
from nasfast.data.loader import open_images
from nasfast.indicators.registry import Score, check_score, configured_score, get_score
from nasfast.indicators.scores import Evidence, NetworkEvidence, combine_scores, parse_sum, score_paths
from nasfast.pipeline.inputs import Inputs, read_layers
from nasfast.pipeline.run import same_images
from nasfast.runtime.device import use_threads
from nasfast.runtime.distributed import SINGLE, World
from nasfast.settings import SPACE_FILE, RunConfig
from nasfast.spaces import Arch, ArchSpace, SearchSpace, named_space
from nasfast.supernet import Supernet
from nasfast.train.checkpoint import Checkpoint, CheckpointFolder
from nasfast.train.supernet import make_supernet

_LOG = logging.getLogger(__name__)

Images = tuple[ImageSource, ImageSource]
"""Those of training and of validation."""


def open_inputs(cfg: RunConfig) -> tuple[Inputs, Images]:
    """The images of the settings, and what they and the settings make a run about.

    The search can use the space and its settings, or this raises what it would.
    """
    space, images = _open_space(cfg)
    return Inputs.checked(cfg, space), images


def find_space(cfg: RunConfig) -> SearchSpace:
    """The space in the run directory, or where there is none, that of the settings with the classes of the images."""
    return read_layers(cfg.run_dir) if (cfg.run_dir / SPACE_FILE).exists() else _open_space(cfg)[0]


def _open_space(cfg: RunConfig) -> tuple[SearchSpace, Images]:
    """The space of the settings, with the classes of the images."""
    images = open_images(cfg.data, seed=cfg.seed, hold_out=cfg.holds_out)
    return cfg.space.get().replace(num_classes=len(images[0].classes)), images


def image_loaders(
    cfg: RunConfig, space: ArchSpace, *, world: World = SINGLE, images: Images | None = None
) -> tuple[Loader, Loader]:
    """The training loader and the validation loader of images of the space's size; ranks share every batch.

    Where training images are held out, they validate, so that the search never sees those of `data.val`. `images` are
    those of `open_inputs`, where they are open already.
    """
    return _make_loaders(cfg.data, space, world, seed=cfg.seed, hold_out=cfg.holds_out, images=images)


def retrain_loaders(
    cfg: RunConfig, space: ArchSpace, *, seed: int | None = None, world: World = SINGLE, hold_out: bool = False
) -> tuple[Loader, Loader]:
    """The loaders of a retraining, with its augmentation; every seed has the same validation images.

    `seed` is that of order and augmentation, None that of the settings. With `hold_out`, held-out training images
    validate.
    """
    seed, policy = cfg.seed if seed is None else seed, cfg.retrain.auto_augment
    train, val = _make_loaders(
        same_images(cfg.data, cfg.seed), space, world, seed=seed, hold_out=hold_out, policy=policy
    )
    if len(train.source.classes) != space.num_classes:
        raise ConfigError(
            f"the images have {len(train.source.classes)} classes, {cfg.run_dir / SPACE_FILE} has {space.num_classes}: "
            "give the images of the run"
        )
    return train, val


def _make_loaders(data: DataConfig, space: ArchSpace, world: World, **options: Any) -> tuple[Loader, Loader]:
    size: dict[str, Any] = {"resolution": space.resolution, "in_channels": space.in_channels}
    return make_loaders(data, **size, rank=world.rank, world=world.size, **options)


def load_supernet(cfg: RunConfig, space: SearchSpace) -> tuple[Supernet, Checkpoint]:
    """The trained supernet of a run directory, whose space this is, and its checkpoint."""
    newest = CheckpointFolder(cfg.run_dir / "checkpoints", "supernet").latest(fingerprint=space.fingerprint)
    if newest is None:
        raise FileNotFoundError(
            f"no supernet checkpoint in {cfg.run_dir}: run `nasfast supernet --out {cfg.out}` first"
        )
    path, checkpoint = newest
    step, settings = checkpoint.state["step"], checkpoint.state["settings"]
    total = settings["train"]["epochs"] * settings["batches_per_epoch"]
    if step < total:
        _LOG.warning("%s was saved at step %d of %d: the supernet's training has not ended", path, step, total)
    net = untrained_supernet(cfg, space)
    net.load_state_dict(checkpoint.part("model."))
    return net, checkpoint


def untrained_supernet(cfg: RunConfig, space: SearchSpace) -> Supernet:
    """The supernet of a space and the settings, with the weights that their seed gives it before training."""
    net, _ = make_supernet(space, cfg.method, cfg.supernet, seed=cfg.seed)
    return net.to(cfg.torch_device).to(memory_format=torch.channels_last)


def load_evidence(cfg: RunConfig, space: SearchSpace) -> tuple[Evidence, Checkpoint]:
    """What the score of the settings is computed from, and the checkpoint of the supernet."""
    use_threads(cfg.threads)
    score = configured_score(cfg.score)
    net, checkpoint = load_supernet(cfg, space)
    return build_evidence(cfg, net if score.trained else untrained_supernet(cfg, space), score), checkpoint


def supernet_to_rank(cfg: RunConfig, space: SearchSpace, *, trained: bool) -> Supernet:
    """The trained supernet of the run directory, or the untrained one, for which the settings do."""
    if trained:
        return load_supernet(cfg, read_layers(cfg.run_dir))[0]
    return untrained_supernet(cfg, space)


def compute_scores(cfg: RunConfig, space: SearchSpace, name: str, archs: Collection[Arch]) -> dict[Arch, float]:
    """The score of this name, or the sum of ranks `A+B-C`, of each architecture of a space; none is distilled."""
    use_threads(cfg.threads)
    parts = []
    for score in split_score(name):
        net = supernet_to_rank(cfg, space, trained=score.trained)
        parts.append(score_paths(score.name, build_evidence(cfg, net, score), archs))
    return combine_scores(name, parts)


def split_score(name: str) -> list[Score]:
    """Each score of a sum of ranks `A+B-C`."""
    return [get_score(part) for _, part in parse_sum(name)]


def check_scoring(cfg: RunConfig, net: Supernet, score: Score) -> None:
    """Refuse a score that the supernet cannot have, before hours of training."""
    check_score(score, net)
    if score.held_out and not cfg.holds_out:
        raise ConfigError(
            f"score {score.name!r} needs images that the supernet is not trained on: set supernet.hold_out=true"
        )


def build_evidence(cfg: RunConfig, net: Supernet, score: Score) -> Evidence:
    """What a score is computed from, for a supernet."""
    check_scoring(cfg, net, score)
    size: dict[str, Any] = {"resolution": net.space.resolution, "in_channels": net.space.in_channels}
    images: Loader | tuple[()] = ()
    loaders = None
    if score.images:
        loaders = image_loaders(cfg, net.space)
        chosen = random_subset(loaders[cfg.holds_out].source, cfg.score.images, cfg.seed)
        images = make_loader(cfg.data, chosen, train=False, **size)
    return Evidence(
        net.eval(),  # once, and not for every path
        images,
        loaders=loaders,
        paths=cfg.score.paths,
        recalibration_batches=cfg.recalibration_batches,
        seed=cfg.seed,
        bf16=cfg.train.precision == "bf16",
    )


def untrained_networks(
    name: str, images: str, *, batch: int, seed: int = 0, cells: int | None = None, channels: int | None = None
) -> NetworkEvidence:
    """What scores of untrained networks are computed from: a space and a loader of augmented training images.

    `images` is a folder with one sub-folder per class, which says how many classes the networks have, and `batch` the
    number of images of a batch. `cells` and `channels` are the size of networks in a space of cells; None keeps the
    space's.
    """
    sizes = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    if sizes and named_space(name).LAYERWISE:
        raise ConfigError(f"{' and '.join(sizes)} belong to spaces of cells, and {name} is a space of layers")
    source = FolderSource(images)
    space = named_space(name, **sizes, num_classes=len(source.classes))
    if len(source) < batch:
        raise ConfigError(f"a batch must have at most {len(source)} images, as many as {images} has, got {batch}")
    data = DataConfig(train=images, batch_size=batch)
    loader = make_loader(data, source, resolution=space.resolution, in_channels=space.in_channels, seed=seed)
    return NetworkEvidence(space, loader, seed=seed)
