"""What the stages of a run read: its images, space and supernet, and the evidence of its score."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, ImageSource, Loader, make_loader, make_loaders, random_subset
from nasfast.data.loader import open_images
from nasfast.indicators.registry import score_of
from nasfast.indicators.scores import Evidence, NetworkEvidence, parts_of, score_paths, summed
from nasfast.pipeline.check import check_scoring, check_search
from nasfast.pipeline.stage import saved_space
from nasfast.runtime.device import use_threads
from nasfast.runtime.distributed import SINGLE, World
from nasfast.settings import SPACE_FILE, RunConfig
from nasfast.spaces import Arch, ArchSpace, SearchSpace, get_space, named_space
from nasfast.supernet import Supernet
from nasfast.train.checkpoint import Checkpoint, CheckpointFolder
from nasfast.train.supernet import make_supernet

_LOG = logging.getLogger(__name__)


def image_loaders(
    cfg: RunConfig,
    space: ArchSpace,
    *,
    hold_out: bool,
    world: World = SINGLE,
    images: tuple[ImageSource, ImageSource] | None = None,
) -> tuple[Loader, Loader]:
    """The training loader and the validation loader of images of the space's size; ranks share every batch.

    With `hold_out`, held-out training images validate, so that the search never sees those of `data.val`. `images` are
    those of `open_images`, where they are open already.
    """
    return _loaders(cfg.data, space, world, seed=cfg.seed, hold_out=hold_out, images=images)


def retrain_loaders(
    cfg: RunConfig, space: ArchSpace, *, seed: int | None = None, world: World = SINGLE, hold_out: bool = False
) -> tuple[Loader, Loader]:
    """The loaders of a retraining, with its augmentation; every seed has the same validation images.

    `seed` is that of order and augmentation, None the run's. With `hold_out`, held-out training images validate.
    """
    data = cfg.data if cfg.data.split_seed is not None else cfg.data.replace(split_seed=cfg.seed)
    seed = cfg.seed if seed is None else seed
    train, val = _loaders(data, space, world, seed=seed, hold_out=hold_out, policy=cfg.retrain.auto_augment)
    if len(train.source.classes) != space.num_classes:
        raise ConfigError(
            f"the images have {len(train.source.classes)} classes, {cfg.run_dir / SPACE_FILE} has {space.num_classes}: "
            "give the images of the run"
        )
    return train, val


def _loaders(data: DataConfig, space: ArchSpace, world: World, **options: Any) -> tuple[Loader, Loader]:
    size: dict[str, Any] = {"resolution": space.resolution, "in_channels": space.in_channels}
    return make_loaders(data, **size, rank=world.rank, world=world.size, **options)


def checked_space(cfg: RunConfig) -> tuple[SearchSpace, tuple[ImageSource, ImageSource]]:
    """The space of the settings, with the classes of the images, once the search can use it; and the images."""
    space, images = _space_and_images(cfg)
    check_search(cfg, space)
    return space, images


def configured_space(cfg: RunConfig, *, world: World = SINGLE) -> tuple[SearchSpace, Loader]:
    """The space of the settings, and the loader that the supernet is trained on; errors as in `checked_space`."""
    space, images = checked_space(cfg)
    return space, image_loaders(cfg, space, hold_out=cfg.holds_out, world=world, images=images)[0]


def _space_and_images(cfg: RunConfig) -> tuple[SearchSpace, tuple[ImageSource, ImageSource]]:
    images = open_images(cfg.data, seed=cfg.seed, hold_out=cfg.holds_out)
    space = get_space(cfg.space.name, resolution=cfg.space.resolution, variant=cfg.space.variant)
    return space.replace(num_classes=len(images[0].classes)), images


def space_of(cfg: RunConfig) -> SearchSpace:
    """The space in the run directory, or where there is none, that of the settings."""
    return saved_space(cfg) if (cfg.run_dir / SPACE_FILE).exists() else _space_and_images(cfg)[0]


def load_supernet(cfg: RunConfig) -> tuple[Supernet, Checkpoint]:
    """The trained supernet of a run directory, and its checkpoint."""
    space = saved_space(cfg)
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
    net = _untrained_supernet(cfg, space)
    net.load_state_dict(checkpoint.part("model."))
    return net, checkpoint


def load_evidence(cfg: RunConfig) -> tuple[Evidence, Checkpoint]:
    """What the score of a run is computed from, and the checkpoint of the supernet."""
    use_threads(cfg.threads)
    score = score_of(cfg.score)
    net, checkpoint = load_supernet(cfg)
    return evidence_for(cfg, net if score.trained else _untrained_supernet(cfg, net.space)), checkpoint


def supernet_to_rank(cfg: RunConfig, *, trained: bool) -> Supernet:
    """The trained supernet of the run directory, or the untrained one of the settings."""
    return load_supernet(cfg)[0] if trained else _untrained_supernet(cfg, space_of(cfg))


def scores_of(cfg: RunConfig, name: str, archs: Collection[Arch]) -> dict[Arch, float]:
    """The score of this name, or the sum of ranks `A+B-C`, of each architecture; none is distilled.

    A score of untrained weights needs only the settings: they say space and weights.
    """
    use_threads(cfg.threads)
    parts = []
    for _, part in parts_of(name):
        own = with_score(cfg, part)
        net = supernet_to_rank(own, trained=score_of(own.score).trained)
        parts.append(score_paths(part, evidence_for(own, net), archs))
    return summed(name, parts)


def with_score(cfg: RunConfig, name: str) -> RunConfig:
    """The settings with this score."""
    return cfg.replace(score=cfg.score.replace(name=name))


def _untrained_supernet(cfg: RunConfig, space: SearchSpace) -> Supernet:
    """The supernet of the settings, with the weights that their seed gives it before training."""
    net, _ = make_supernet(space, cfg.method, cfg.supernet, seed=cfg.seed)
    return net.to(cfg.torch_device).to(memory_format=torch.channels_last)


def evidence_for(cfg: RunConfig, net: Supernet) -> Evidence:
    """What the score of the settings is computed from, for a supernet."""
    check_scoring(cfg, net)
    settings = cfg.score
    score = score_of(settings)
    images: Loader | tuple[()] = ()
    loaders = None
    if score.images:
        hold_out = cfg.holds_out
        loaders = image_loaders(cfg, net.space, hold_out=hold_out)
        images = make_loader(
            cfg.data,
            random_subset(loaders[hold_out].source, settings.images, cfg.seed),
            train=False,
            resolution=net.space.resolution,
            in_channels=net.space.in_channels,
        )
    return Evidence(
        net,
        images,
        loaders=loaders,
        paths=settings.paths,
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
