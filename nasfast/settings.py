"""All settings of a run, by stage; their fields are the flags of the command line and the keys of the YAML files.

`RunConfig`, at the end, holds the others. Nothing here imports torch, because the help of a command must not wait for
it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from nasfast.config import ConfigBase, ConfigError, Number, marked, nearest, to_number
from nasfast.runtime.image_files import class_folders, read_image_list
from nasfast.spaces import SearchSpace, get_space, named_space

CONFIG_FILE = "config.yaml"
"""The resolved settings of the run."""

SPACE_FILE = "space.yaml"
"""The search space; also beside the weights of a trained network."""

STABILITY_FILE = "stability.json"
"""How far the seeds of `nasfast run --seeds` agree."""

FULL, SMALL, FINETUNED, INT8 = "full", "small", "finetuned", "int8"
"""Networks of a run of `nasfast shrink`: the full one, adapted, the result, the result with all weights trained, and
the full one in 8-bit integers."""


MACHINE = "machine"
"""Kind of the settings on which no result depends."""

RESUMED = "resumed"
"""Kind of those that may change when a run resumes, too: they belong to later stages, or to the place."""

SUPERNET = "supernet"
"""Kind of those on which the files of a search without a supernet do not depend."""


def check_device(name: str) -> None:
    """Raise ValueError unless `name` is auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")


def check_common(threads: int, seed: int, **counts: int) -> None:
    """Raise ValueError if threads or seed are negative, or a count is below 1."""
    if threads < 0 or seed < 0:
        raise ValueError(f"threads and seed must not be negative, got {threads} and {seed}")
    check_counts(**counts)


def check_counts(**counts: int) -> None:
    """Raise ValueError if a count is below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


AutoAugment = Literal["autoaugment", "randaugment", "trivialaugment"]
"""Augmentation policies of torchvision.transforms.v2 that are applied to images after crop and flip."""


def check_policy(loader: str, policy: AutoAugment | None) -> None:
    """Refuse a policy that a loader cannot apply: `dali` and `cache` do not call torchvision's transforms."""
    if policy is not None and loader in ("dali", "cache"):
        raise ConfigError(
            f"data.loader={loader!r} cannot augment by {policy!r}, which torchvision applies to single images: set "
            "data.loader to torchvision or auto, or leave retrain.auto_augment out"
        )


@dataclass(frozen=True)
class DataConfig(ConfigBase):
    """Where images come from and how they are fed.

    Attributes:
        source: `folder` (image files), `digits` (scikit-learn's handwritten digits) or `cluttered_digits` (the same
            among pieces of others, which is harder).
        train: training images: a folder, `train/CLASS/IMAGE`, or a text file of lines `IMAGE LABEL`.
        val: validation images of the same classes; null holds out `val_fraction` of the training images.
        val_fraction: share of each class that is held out when `val` is not given.
        split_seed: seed of that choice; null takes the run's. With a seed of its own, runs of different seeds have the
            same validation images.
        batch_size: images per optimiser step, over all ranks.
        augment: `imagenet` (random resized crop, flip, lighting), `cifar` (pad, crop, flip), `shift` (pad, crop),
            `none`, or `auto`: `shift` for digits, otherwise `cifar` up to 64 pixels and `imagenet` above.
        loader: `torchvision` (in worker processes), `dali` (NVIDIA DALI, on the GPU or the CPU), `cache` (each image is
            decoded once and kept at one size, which `augment: imagenet` has not), or `auto`, which logs its choice and
            the reason.
        workers: decoding processes or threads per rank; 0 decodes in the training process. Results do not depend on it.
        prefetch: number of batches prepared ahead, for `torchvision` by each worker.
        cache_dir: folder of the files of `cache`; null takes `nasfast/images` in the user's cache folder.
        max_bad_files: unreadable images are skipped and named; more than this many on one rank stop the run.
        mean: finite value per channel that is subtracted from images scaled to [0, 1]; grey images take the average.
        std: positive value per channel that images are then divided by; grey images take the average.
    """

    source: Literal["folder", "digits", "cluttered_digits"] = "folder"
    train: str | None = marked(RESUMED, None)
    val: str | None = marked(RESUMED, None)
    val_fraction: float = 0.1
    split_seed: int | None = None
    batch_size: int = 128
    augment: Literal["auto", "imagenet", "cifar", "shift", "none"] = "auto"
    loader: Literal["auto", "torchvision", "dali", "cache"] = marked(RESUMED, "auto")
    workers: int = marked(MACHINE, 2)
    prefetch: int = marked(MACHINE, 2)
    cache_dir: str | None = marked(MACHINE, None)
    max_bad_files: int = marked(MACHINE, 20)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def _check_values(self) -> None:
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size must be at least 2 (BatchNorm needs more than one image), got {self.batch_size}"
            )
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if min(self.workers, self.max_bad_files) < 0:
            raise ValueError(
                f"workers and max_bad_files must not be negative, got {self.workers}, {self.max_bad_files}"
            )
        if self.prefetch < 1:
            raise ValueError(f"prefetch must be positive, got {self.prefetch}")
        if not all(map(math.isfinite, self.mean)):
            raise ValueError(f"mean must be finite, got {self.mean}")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise ValueError(f"std must be positive and finite, got {self.std}: 1 leaves a channel unscaled")

    def check_paths(self) -> None:
        """Refuse images that are not named, not there or without classes, and one folder for both sets."""
        if self.source != "folder":
            return
        if self.train is None:
            raise ConfigError("data.train is not set: give the training folder, e.g. --data.train images/train")
        if self.val is not None and Path(self.val).resolve() == Path(self.train).resolve():
            raise ConfigError(
                f"data.train and data.val are both {self.train}, but a network must be judged on other images: leave "
                f"data.val out, which keeps {self.val_fraction:g} of the training images apart, or give another folder"
            )
        for path in filter(None, (self.train, self.val)):
            if not Path(path).exists():
                raise ConfigError(
                    f"{path} does not exist: give a folder with one sub-folder per class, or a list of images"
                )
            if Path(path).is_dir():
                try:
                    class_folders(Path(path))
                except ValueError as error:
                    raise ConfigError(str(error)) from error

    @property
    def classes(self) -> int | None:
        """Number of classes of the training images; None if these are not given. ValueError if a list is damaged."""
        if self.source != "folder":
            return 10
        path = Path(self.train or "")
        if self.train is None or not path.exists():
            return None
        return len({label for _, label in read_image_list(path)} if path.is_file() else class_folders(path))


@dataclass(frozen=True)
class ImageInfo(ConfigBase):
    """Preprocessing at evaluation, and the classes.

    Attributes:
        classes: name of every output, in order.
        short_side: pixels of the short side to which an image is resized, bilinear with antialiasing.
        resolution: height and width in pixels of the centre that is then cropped.
        mean, std: of every channel of images scaled to [0, 1]: (x - mean) / std. Three channels are red, green and
            blue, one is grey.
    """

    classes: tuple[str, ...]
    short_side: int
    resolution: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def _check_values(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"mean and std must have 1 or 3 values each, got {self.mean} and {self.std}")
        if not 0 < self.resolution <= self.short_side:
            raise ValueError(f"resolution must be 1 to short_side ({self.short_side}), got {self.resolution}")


Init = Literal["orthogonal", "aligned", "delta_orthogonal", "gaussian", "he"]
Trainable = Literal["indicators", "bn", "all"]
MethodName = Literal["dinas", "dinas_paper", "bnnas", "fairnas", "spos"]


@dataclass(frozen=True)
class Method:
    """The preset of a method: fields of `SupernetConfig` and `ScoreConfig`, where `score` is the latter's `name`."""

    init: Init
    layer_indicators: bool
    trainable: Trainable
    classifier: bool
    sampler: Literal["uniform", "fair", "strict_fair"]
    hold_out: bool
    score: str
    distill: bool
    structure: float


METHODS: dict[MethodName, Method] = {
    "dinas": Method("aligned", True, "bn", True, "fair", True, "path_loss", True, 4.0),
    "dinas_paper": Method("orthogonal", True, "indicators", False, "fair", False, "gamma", True, 0.0),
    "bnnas": Method("he", False, "indicators", False, "uniform", False, "gamma", True, 0.0),
    "fairnas": Method("he", False, "all", False, "strict_fair", True, "recalibrated_accuracy", False, 0.0),
    "spos": Method("he", False, "all", False, "uniform", True, "recalibrated_accuracy", False, 0.0),
}
"""`dinas` is this package's method (docs/ranking.md). The others follow their publications: DI-NAS (`dinas_paper`),
BN-NAS, FairNAS and Single Path One-Shot."""


@dataclass(frozen=True)
class SupernetConfig(ConfigBase):
    """How the supernet is built and trained; null takes the method's preset.

    Attributes:
        init: initialisation scheme: `orthogonal`, `aligned`, `delta_orthogonal`, `gaussian` or `he`.
        alignment: the centre tap's share of a depthwise filter for `init: aligned`, from 0 to 1; null takes 0.7, or 0.9
            in a space of more than ten searched layers.
        linear_share: share of the common linear part in a projection for `init: aligned`, from 0 to 1; null takes 0.85,
            or 0.95 in such a space.
        shift: initial beta of the BatchNorms in front of activations for `init: aligned`; null takes 0, or 1 in such a
            space.
        branch_scale: initial gamma of the last BatchNorm of blocks that add their input for `init: aligned`; null takes
            1, or 0.3 in such a space.
        layer_indicators: whether normal layers have a path identity -> BN beside their candidates.
        trainable: what trains: `indicators`, `bn` or `all`.
        classifier: whether the classifier trains too (`trainable: all` includes it).
        sampler: `fair` (Algorithm 1), `strict_fair` (FairNAS) or `uniform` (SPOS).
        activation: activation of the blocks of layers that have none of their own; null takes the space's.
        hold_out: whether to keep `data.val_fraction` of the training images out of supernet training; scores of paths
            need them.
    """

    init: Init | None = None
    alignment: float | None = None
    linear_share: float | None = None
    shift: float | None = None
    branch_scale: float | None = None
    layer_indicators: bool | None = None
    trainable: Trainable | None = None
    classifier: bool | None = None
    sampler: Literal["uniform", "fair", "strict_fair"] | None = None
    activation: Literal["identity", "relu", "relu6", "tanh", "hswish", "silu"] | None = None
    hold_out: bool | None = None

    def _check_values(self) -> None:
        for name, value in self.aligned.items():
            if name in ("alignment", "linear_share") and not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    def preset(self, method: str) -> Method:
        """The method's preset, with the values that are set here in place of its own."""
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; {nearest(method, METHODS)}")
        names = ("init", "layer_indicators", "trainable", "classifier", "sampler", "hold_out")
        overrides = {name: value for name in names if (value := getattr(self, name)) is not None}
        preset = replace(METHODS[method], **overrides)
        if self.aligned and preset.init != "aligned":
            name, value = next(iter(self.aligned.items()))
            raise ValueError(
                f"{name}={value} needs init='aligned', got init={preset.init!r}: leave {name} out, or set the init"
            )
        return preset

    @property
    def aligned(self) -> dict[str, float]:
        """The settings of aligned weights that are set, by name."""
        names = ("alignment", "linear_share", "shift", "branch_scale")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def resolved(self, method: str) -> SupernetConfig:
        """Every null but activation and settings of aligned weights replaced by the preset; errors as in `preset`."""
        preset = self.preset(method)
        return self.replace(**{f.name: getattr(preset, f.name) for f in fields(self) if hasattr(preset, f.name)})


DEEP_LAYERS = 10
"""Spaces of more searched layers than this take other initial weights (`init: aligned`) and another learning rate."""


ALL_LR = 0.1
"""Peak learning rate of a network all of whose weights train, where none is given."""


def default_lr(trainable: Trainable, layers: int) -> float:
    """Peak learning rate where none is given.

    The gradients of indicators are small: at 0.1 the gammas of a frozen network hardly leave 1 in a few thousand steps.
    Indicators take 0.5, the supernet rate of the Single Path One-Shot and BN-NAS settings. All BatchNorms together take
    0.4, or 0.05 in a space of more than ten searched layers (docs/ranking.md 1).
    """
    return {"indicators": 0.5, "bn": 0.05 if layers > DEEP_LAYERS else 0.4, "all": ALL_LR}[trainable]


@dataclass(frozen=True)
class TrainConfig(ConfigBase):
    """How one stage trains: SGD with a cosine learning rate.

    Attributes:
        epochs: passes over the training images.
        lr: peak learning rate; null takes 0.5 where only indicators train, 0.4 where all BatchNorms of a supernet
            train, or 0.05 if its space has more than ten searched layers, and 0.1 elsewhere.
        lr_end: learning rate at the end of the cosine.
        momentum: momentum of SGD.
        nesterov: whether the momentum is Nesterov's.
        weight_decay: weight decay of SGD; BatchNorm parameters and biases have none.
        warmup_epochs: epochs of linear warm-up; may be a fraction.
        label_smoothing: label smoothing of the cross-entropy.
        clip_norm: largest gradient norm; 0 does not clip.
        precision: `fp32`, `bf16` autocast, or `auto`: bf16 on a GPU of compute capability 8.0 or later whose CUDA
            kernels are there, otherwise fp32. A run keeps what it began with.
        engine: `eager`, `graphs` (CUDA graphs per candidate of a supernet), or `auto`: graphs where they are possible.
        log_every: optimiser steps between log lines.
        checkpoint_every: optimiser steps between checkpoints; 0 saves one per epoch. Every evaluation saves one too.
        keep_checkpoints: number of newest checkpoints to keep; the second newest is the fallback for a damaged newest
            one. The checkpoint of the best validation top-1 is kept besides.
        eval_every: epochs between evaluations where there is a validation loader; the last epoch always has one.
    """

    epochs: int = 10
    lr: float | None = None
    lr_end: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 4e-5
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.1
    clip_norm: float = 5.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    engine: Literal["auto", "eager", "graphs"] = "auto"
    log_every: int = 20
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    eval_every: int = 1

    @property
    def result_settings(self) -> dict[str, Any]:
        """The settings that a checkpoint must match: all but the engine, which changes how a step is executed.

        Graphs and eager steps may round differently, so a run resumed with another engine may end with other bytes.
        """
        return {name: value for name, value in self.to_dict().items() if name != "engine"}

    @property
    def peak_lr(self) -> float:
        """`lr` of a stage that trains.

        Raises:
            ValueError: it is null.
        """
        if self.lr is None:
            raise ValueError("train: cfg.lr is not set: give a learning rate (train_supernet and retrain choose one)")
        return self.lr

    def _check_values(self) -> None:
        # the conditions are written so that NaN fails too
        for name in ("epochs", "lr", "log_every", "keep_checkpoints", "eval_every"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("lr_end", "momentum", "weight_decay", "warmup_epochs", "clip_norm", "checkpoint_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")


_STRUCTURE = {"isometry": 5.0}
"""Weight of `sqrt_size` beside a score that is not a method's preset, by score: 5 is the 0.2 of `isometry` beside
`sqrt_size`, which was chosen on NAS-Bench-Macro (docs/ranking.md). The weight of others is 0."""


@dataclass(frozen=True)
class ScoreConfig(ConfigBase):
    """How architectures are scored; null takes the method's preset.

    Attributes:
        name: name of a score: `path_loss`, `gamma`, ...; docs/ranking.md lists them.
        distill: whether to fit a table to a score of paths, for the exact search; otherwise the search by evolution
            computes it for each architecture.
        structure: weight of the baseline `sqrt_size`, which is added to the score, both divided by their standard
            deviations; 0 leaves the score in its own unit. Null takes the preset's for the preset's score, 5 for
            `isometry`, and 0 for others.
        paths: number of sampled paths; null takes 300, or more for a space of many candidates.
        images: number of images on which paths are scored.
        table: file of the user's own values by layer and choice, which are the score instead of `name`; docs/latency.md
            has its format.
    """

    name: str | None = None
    distill: bool | None = None
    structure: float | None = None
    paths: int | None = None
    images: int = 1000
    table: str | None = None

    def _check_values(self) -> None:
        if self.structure is not None and not 0 <= self.structure < math.inf:
            raise ValueError(f"structure must not be negative, got {self.structure}")
        if (self.paths is not None and self.paths < 1) or self.images < 2:
            raise ValueError(f"paths must be at least 1 and images at least 2, got {self.paths} and {self.images}")

    def resolved(self, method: MethodName) -> ScoreConfig:
        """The same settings, with name, distill and structure of the method's preset where they are null.

        The preset's weight of structure belongs to the preset's score: another score has its own, or none.
        """
        preset = METHODS[method]
        name = self.name or preset.score
        weight = preset.structure if name == preset.score else _STRUCTURE.get(name, 0.0)
        return self.replace(
            name=name,
            distill=preset.distill if self.distill is None else self.distill,
            structure=weight if self.structure is None else self.structure,
        )

    @property
    def label(self) -> str:
        """What a table of this score of a resolved config says about its origin."""
        return f"{self.name}" if self.table is None else f"table {self.table}"

    @property
    def words(self) -> str:
        """The score and what is added to it, in a line of a stage."""
        return self.label + (f" + {self.structure:g} sqrt_size" if self.structure and self.table is None else "")


LIMITS = ("max_macs", "max_params", "max_latency_ms")
"""The settings of a search that are limits, besides those in `tables`."""


@dataclass(frozen=True)
class SearchConfig(ConfigBase):
    """How architectures are searched.

    Attributes:
        method: `exact` (integer program over an indicator table), `evolution` (any score), or `auto`: exact where
            scores add up over layers.
        top_k: number of architectures in the result.
        max_macs: largest MACs per image of the standalone network; null is no limit.
        max_params: largest number of parameters of the standalone network; null is no limit.
        max_latency_ms: largest latency of the standalone network in ms, by `latency_table`; null is no limit.
        latency_table: file of latencies that `nasfast latency` wrote; null is none.
        latency_device: the device that the table must be of; null takes any.
        latency_batch: the batch that the table must be of; null takes any.
        tables: files of tables of other costs, each with its limit, as in "energy.json <= 40". Without a limit the cost
            is only reported. docs/latency.md has the format.
        population: number of architectures evaluated per generation.
        generations: number of generations; 20 x 50 = 1000 evaluations, as in Single Path One-Shot and BN-NAS.
        parents: number of best architectures so far from which children are made.
        crossovers: children per generation that mix two parents; random architectures complete the population.
        mutations: children per generation that change one parent.
        mutation_prob: probability that a mutation redraws a layer.
        seed: seed of the evolution; null takes the run's, or 0.
        allow_identity: whether the result may skip normal layers; a skipped layer scores its layer indicator.
        refine: file of trained accuracies (JSON or CSV) that refine the table before the search, where cross-validation
            says that this gains; null searches the table as it is.
    """

    method: Literal["auto", "exact", "evolution"] = "auto"
    top_k: int = 5
    max_macs: float | Number | None = None
    max_params: float | Number | None = None
    max_latency_ms: float | None = None
    latency_table: str | None = None
    latency_device: str | None = None
    latency_batch: int | None = None
    tables: tuple[str, ...] = ()
    population: int = 50
    generations: int = 20
    parents: int = 10
    crossovers: int = 25
    mutations: int = 25
    mutation_prob: float = 0.1
    seed: int | None = None
    allow_identity: bool = False
    refine: str | None = None

    def _check_values(self) -> None:
        check_counts(**{name: getattr(self, name) for name in ("top_k", "population", "generations", "parents")})
        if min(self.crossovers, self.mutations) < 0 or self.crossovers + self.mutations > self.population:
            raise ValueError(
                "crossovers and mutations must not be negative, and their sum must be at most "
                f"population={self.population}, got {self.crossovers} and {self.mutations}"
            )
        if not 0 <= self.mutation_prob <= 1:
            raise ValueError(f"mutation_prob must be in [0, 1], got {self.mutation_prob}")
        for name, value in self.limits.items():
            if not 0 < value < math.inf:
                which = name if name in LIMITS else f"the limit of {name}"
                raise ValueError(f"{which} must be positive and finite (null for no limit), got {value!r}")
        if self.latency_table is None and self.max_latency_ms is not None:
            raise ValueError(
                f"max_latency_ms={self.max_latency_ms:g} needs latency_table, a file that `nasfast latency` writes"
            )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are not null, by the name of their setting, or of `tables` by their file."""
        plain = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in [*plain.items(), *self.table_limits] if value is not None}

    @property
    def unlimited(self) -> SearchConfig:
        """The same settings without any limit; its tables only say what an architecture costs."""
        tables = tuple(file for file, _ in self.table_limits)
        return self.replace(**dict.fromkeys(LIMITS), tables=tables)

    @property
    def table_limits(self) -> list[tuple[str, float | None]]:
        """Files of `tables` and their limits.

        Raises:
            ValueError: a limit is no number.
        """
        limits: list[tuple[str, float | None]] = []
        for text in self.tables:
            file, sign, maximum = text.rpartition("<=")
            if not sign:
                limits.append((text, None))
                continue
            try:
                limits.append((file.strip(), to_number(maximum.strip())))
            except ValueError:
                raise ValueError(f"tables: expected 'FILE <= NUMBER' or 'FILE', got {text!r}") from None
        return limits


CHOICES = ("top_k", "random_architectures", "seeds", "parallel")
"""The settings that say which networks are trained, and by which processes; the others say how one is trained."""


@dataclass(frozen=True)
class RetrainConfig(ConfigBase):
    """Settings of the retraining stage.

    Attributes:
        init: initial weights: `orthogonal`, `delta_orthogonal`, `gaussian` or `he`, or `inherit` for the supernet's.
        top_k: number of best architectures to retrain.
        random_architectures: number of random architectures with about the MACs of the best one to retrain, for
            comparison. A single one may be good or bad for its cost by chance. 0 makes no comparison.
        seeds: how often each architecture is retrained, with the seeds `seed`, `seed + 1`, ...; random architectures
            are retrained once each.
        parallel: with several processes, `batch` lets all of them train each network, each with a share of every batch;
            `networks` lets each process train networks of its own, as a single process would.
        ema: decay, between 0 and 1, of an exponential moving average of the weights and BatchNorm statistics, which
            every step updates: 0.999 averages about the last 1000 steps. The average is evaluated and saved. null takes
            the last weights.
        mixup: alpha > 0 of mixup (0.2 is usual): each image is blended with another of its batch, and their labels in
            the same shares, which are drawn from Beta(alpha, alpha). null blends none.
        cutmix: alpha > 0 of CutMix (1 is usual): a rectangle of each image is that of another, and labels are blended
            by area. With mixup too, each batch has one of the two, with equal chances. null cuts none.
        auto_augment: `autoaugment`, `randaugment` or `trivialaugment` of torchvision, applied after crop and flip; the
            loader must be `torchvision`, which `auto` then takes. AutoAugment has the policy of SVHN for `data.augment:
            shift`, of CIFAR-10 for `cifar`, and of ImageNet otherwise. null applies none.
        patience: the training ends after this many evaluations, at least 1, without a better validation top-1 (there is
            one every `train.eval_every` epochs), and the weights of the best evaluation are kept, so the accuracy is
            slightly too good. null trains all epochs and keeps the last weights.
        train: settings of the training.
    """

    init: Literal["orthogonal", "delta_orthogonal", "gaussian", "he", "inherit"] = "orthogonal"
    top_k: int = 1
    random_architectures: int = 3
    seeds: int = 1
    parallel: Literal["batch", "networks"] = "batch"
    ema: float | None = None
    mixup: float | None = None
    cutmix: float | None = None
    auto_augment: AutoAugment | None = None
    patience: int | None = None
    train: TrainConfig = TrainConfig(epochs=20, lr=0.1)

    def _check_values(self) -> None:
        check_counts(top_k=self.top_k, seeds=self.seeds)
        if self.random_architectures < 0:
            raise ValueError(f"random_architectures must not be negative, got {self.random_architectures}")
        # the conditions are written so that NaN fails too
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must be between 0 and 1, e.g. 0.999, got {self.ema}; null keeps no average")
        for name, usual in (("mixup", 0.2), ("cutmix", 1.0)):
            if (alpha := getattr(self, name)) is not None and not 0 < alpha < math.inf:
                raise ValueError(f"{name} must be positive, e.g. {usual}, got {alpha}; null switches it off")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}; null trains all epochs")

    @property
    def network_settings(self) -> RetrainConfig:
        """What the training of one network depends on: the settings in `CHOICES` have their defaults."""
        return self.replace(**{name: getattr(RetrainConfig, name) for name in CHOICES})

    @property
    def recipe(self) -> dict[str, float | str]:
        """What is set of the fields that change how a network is trained, except `train` and `init`."""
        values = {name: getattr(self, name) for name in ("ema", "mixup", "cutmix", "auto_augment", "patience")}
        return {name: value for name, value in values.items() if value is not None}


# timers of Python fail with much more
_MOST_HOURS = 1_000_000


@dataclass(frozen=True)
class TaskSettings(ConfigBase):
    """Where and for how long tasks run. What they compute does not depend on it.

    Attributes:
        executor: `processes` of this machine, or the workers of a `ray` cluster.
        workers: tasks at a time on this machine; 0 or null takes as many as cores and memory allow. A Ray cluster
            decides by itself. Networks are retrained as tasks if this is given, 0 included, or the executor is `ray`.
        attempts: how often a task is tried that fails or whose worker dies.
        max_hours: the command stops cleanly after this time, and can be continued; null for no limit.
        ray_address: `HOST:PORT` of the cluster; null takes the cluster of this machine.
    """

    executor: Literal["processes", "ray"] = "processes"
    workers: int | None = None
    attempts: int = 3
    max_hours: float | None = None
    ray_address: str | None = None

    def _check_values(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers must not be negative, got {self.workers}; 0 takes as many as the machine allows")
        check_counts(attempts=self.attempts)
        if self.max_hours is not None and not 0 < self.max_hours <= _MOST_HOURS:
            raise ValueError(f"max_hours must be positive and at most {_MOST_HOURS:,}, got {self.max_hours}")
        if self.ray_address is not None and self.executor != "ray":
            raise ValueError(f"--ray_address {self.ray_address} needs --executor ray")

    @property
    def executor_settings(self) -> TaskSettings | None:
        """These settings without the hours, where a whole command has them; None if no other is given."""
        settings = self.replace(max_hours=None)
        return None if settings == TaskSettings() else settings


@dataclass(frozen=True)
class SpaceConfig(ConfigBase):
    """The search space of a run.

    Attributes:
        name: a built-in name (`nasfast spaces` lists them), or the path of a YAML file.
        variant: `bnnas` is the released BN-NAS configuration of `mobilenet_v2`.
        resolution: height and width of the images in pixels; null takes the space's.
    """

    name: str = "mobilenet_v2"
    variant: str | None = None
    resolution: int | None = None

    def get(self, num_classes: int | None = None) -> SearchSpace:
        """The space with so many classes, None for its own; errors as in `nasfast.spaces.get_space`."""
        return get_space(self.name, num_classes=num_classes, resolution=self.resolution, variant=self.variant)


@dataclass(frozen=True)
class RunConfig(ConfigBase):
    """All settings of a run; the resolved form is saved as config.yaml in the run directory.

    Attributes:
        out: run directory, the folder that the command reads and writes.
        seed: seed of the weights, paths, data order, augmentation and search.
        device: `auto`, `cpu` or `cuda`.
        threads: number of CPU threads in every stage; 0 takes torch's choice. Bit-identical repeats need the same
            number.
        method: `dinas`, `dinas_paper` (as its paper describes it), or a baseline: `bnnas`, `fairnas`, `spos`.
        space: the search space.
        data: the images and how they are fed.
        supernet: overrides of the method's preset.
        train: training of the supernet.
        score: the score that ranks architectures.
        recalibration_batches: number of batches for BN statistics where paths are scored by accuracy (fairnas, spos).
        search: limits and search method.
        retrain: training of the chosen architectures.
        track: where metrics go besides metrics.jsonl and TensorBoard: any of `wandb`, `trackio`, `mlflow`. Each needs
            its package; a failure is a warning, and the training goes on.
    """

    out: str = marked(RESUMED, "runs/nasfast")
    seed: int = 0
    device: str = marked(RESUMED, "auto")
    threads: int = marked(RESUMED, 0)
    method: MethodName = marked(SUPERNET, "dinas")
    space: SpaceConfig = SpaceConfig()
    data: DataConfig = DataConfig()
    supernet: SupernetConfig = marked(SUPERNET, SupernetConfig())
    train: TrainConfig = marked(SUPERNET, TrainConfig())
    score: ScoreConfig = marked(RESUMED, ScoreConfig())
    recalibration_batches: int = marked(RESUMED, 20)
    search: SearchConfig = marked(RESUMED, SearchConfig())
    retrain: RetrainConfig = marked(RESUMED, RetrainConfig())
    track: tuple[Literal["wandb", "trackio", "mlflow"], ...] = marked(MACHINE, ())

    def _check_values(self) -> None:
        check_common(self.threads, self.seed, recalibration_batches=self.recalibration_batches)
        check_device(self.device)
        check_policy(self.data.loader, self.retrain.auto_augment)

    def resolved(self) -> RunConfig:
        """The same settings, with each null that the method's preset decides replaced by its value.

        Raises:
            ConfigError: the learning rate depends on the space, and that cannot be read.
        """
        lr = self.train.lr
        if lr is None:
            # whichever variant, resolution and classes: they do not change on which side of DEEP_LAYERS a space is
            lr = default_lr(self.supernet.preset(self.method).trainable, len(named_space(self.space.name)))
        search_seed = self.seed if self.search.seed is None else self.search.seed
        return self.replace(
            supernet=self.supernet.resolved(self.method),
            train=self.train.replace(lr=lr),
            score=self.score.resolved(self.method),
            search=self.search.replace(seed=search_seed),
        )

    @property
    def run_dir(self) -> Path:
        """The run directory as a path."""
        return Path(self.out)

    @property
    def score_settings(self) -> dict[str, Any]:
        """The settings of scores, which a result keeps, because config.yaml may get others later."""
        return {"score": self.score.to_dict(), "recalibration_batches": self.recalibration_batches}

    @property
    def holds_out(self) -> bool:
        """Whether some of the training images are kept out of supernet training."""
        return self.supernet.preset(self.method).hold_out

    @property
    def torch_device(self) -> str:
        """The device to use, `cpu` or `cuda`.

        Raises:
            ConfigError: `device` is cuda and torch sees no GPU.
        """
        # imported here, because it imports torch, and help must not wait for that
        from nasfast.runtime.device import torch_device

        return torch_device(self.device)
