"""What the stages of `nasfast shrink` work on: the network, the images, and what was adapted and measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from nasfast import shrink
from nasfast.config import ConfigError
from nasfast.display import counted
from nasfast.pipeline.run import log_stage
from nasfast.pipeline.shrinking.files import (
    clone,
    read_measured,
    read_tensors,
    save_measured,
    save_tensors,
    weights_digest,
)
from nasfast.pipeline.shrinking.images import Images, Lesson, Shown, Targets, lesson_epochs
from nasfast.pipeline.shrinking.models import (
    Pretrained,
    Renormalised,
    fit_classifier,
    load_pretrained,
    with_classes,
)
from nasfast.pipeline.shrinking.run import ShrinkRun
from nasfast.runtime.onnx import require_onnx
from nasfast.settings import DataConfig
from nasfast.shrink import Found, Measured

_LOG = logging.getLogger(__name__)

TEACHER_FILE = "teacher.safetensors"


class Material:
    """What the stages work on; each part is made at its first use, or read where a stage has written it.

    Args:
        run: the run.
    """

    def __init__(self, run: ShrinkRun) -> None:
        self.run, self.cfg = run, run.cfg
        self._val: dict[int, Shown] = {}
        self._samples: dict[int, Tensor] = {}
        self._found: dict[int, Found] = {}
        self._measured: dict[int, Measured] = {}

    @cached_property
    def pretrained(self) -> Pretrained:
        """The network as it is given."""
        assert self.cfg.model is not None, "ShrinkConfig.check_begins refuses it"
        return load_pretrained(self.cfg.model, self.cfg.weights)

    @cached_property
    def images(self) -> Images:
        """The images."""
        return Images.open(self.cfg, self.pretrained.data(self.cfg.data), self.pretrained.channels)

    @property
    def resolution(self) -> int:
        """The largest side of the images."""
        return self.cfg.resolution or self.pretrained.resolution

    @cached_property
    def train(self) -> Shown:
        """The training images at the largest size."""
        return self.images.read(self.images.train, self.resolution)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Training images as they are, with labels, without the held-out ones."""
        taught = torch.ones(len(self.train[1]), dtype=torch.bool)
        taught[self.held_out] = False
        shown, labels = self.train
        for places in taught.nonzero().squeeze(1).split(64):
            yield self.images.prepared(shown[places]), labels[places]

    def val(self, size: int) -> Shown:
        """The validation images at a size."""
        if size not in self._val:
            self._val[size] = self.images.read(self.images.val, size)
        return self._val[size]

    @cached_property
    def lesson(self) -> Lesson:
        """The views that every network is adapted on."""
        return Lesson(self.images, self.train, batch=self.images.data.batch_size, epochs=lesson_epochs(self.cfg.epochs))

    @cached_property
    def about(self) -> dict[str, Any]:
        """What every result depends on besides the settings."""
        return {"weights": weights_digest(self.pretrained.model), "images": self.images.digest}

    @cached_property
    def form(self) -> nn.Module:
        """A network of the form of the teacher: with as many classes as the images have."""
        return with_classes(self.pretrained.model, self.images.classes)

    @cached_property
    def pretrained_peer(self) -> Pretrained:
        """The network that the user names for comparison, as it is given."""
        assert self.cfg.peer is not None, "it is asked for where there is one"
        return load_pretrained(self.cfg.peer, None)

    @cached_property
    def peer(self) -> Found:
        """This network, of as many classes, with the images of the network that is cut."""
        given = self.pretrained_peer
        if given.channels != self.pretrained.channels:
            raise ConfigError(
                f"the peer takes images of {given.channels} channels, the network {self.images.channels}: give one "
                "that takes as many"
            )
        own = self.images.data
        other = given.data(own.replace(mean=DataConfig.mean, std=DataConfig.std))
        model = with_classes(Renormalised(given.model, own, other, given.channels), self.images.classes)
        return shrink.find(model, torch.zeros(1, given.channels, self.resolution, self.resolution), name=given.name)

    def teach(
        self,
        model: nn.Module,
        epochs: int,
        *,
        size: int | None = None,
        by_labels: bool = False,
        kept: Tensor | None = None,
        all_images: bool = False,
        **options: Any,
    ) -> list[float]:
        """Adapt a network at a size by the lesson, from its first epoch.

        Args:
            model: the network.
            epochs: number of them.
            size: side of its images; the largest by default.
            by_labels: whether labels alone teach, without the teacher.
            kept: the features of the teacher that the network has; None teaches no features.
            all_images: whether the held-out images are in the lesson, after which nothing is compared on them.
            options: of `nasfast.shrink.adapt`.
        """
        without = slice(0) if all_images else self.held_out
        if by_labels:
            return shrink.adapt(model, self.lesson.begin(size=size, without=without), epochs=epochs, **options)
        lesson = self.lesson.begin(self.targets, kept, size=size, without=without)
        return shrink.adapt(model, lesson, teacher=lesson.teacher, features=kept is not None, epochs=epochs, **options)

    def kept_features(self, recipe: shrink.Recipe | None) -> Tensor | None:
        """The features of the teacher that the network of a recipe has; None where networks do not give theirs."""
        return shrink.kept_features(self.form, recipe) if self.gives_features else None

    @cached_property
    def gives_features(self) -> bool:
        """Whether the networks' outputs are those of their classifier, so that its inputs are features to teach."""
        gives = shrink.gives_features(self.form, torch.zeros(2, self.pretrained.channels, *2 * (self.resolution,)))
        if not gives:
            _LOG.info("the network's outputs are not those of its last linear layer: its logits alone teach")
        return gives

    @cached_property
    def teacher(self) -> nn.Module:
        """The full network, adapted to the images at the largest size."""
        return adapt_teacher(self)

    @cached_property
    def targets(self) -> Targets:
        """What the teacher gives for all views of the lesson; writes targets.safetensors."""
        path = self.run.dir / "targets.safetensors"
        if (kept := read_tensors(path, self.about)) is None:
            teacher = shrink.with_features(self.teacher) if self.gives_features else self._logits_alone
            kept = self.lesson.taught_by(teacher)._asdict()
            save_tensors(path, kept, self.about)
        return Targets(**kept)

    def _logits_alone(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.teacher(images), images.new_empty(len(images), 0)

    def at_size(self, size: int) -> nn.Module:
        """The full network, adapted at a size."""
        return self.teacher if size == self.resolution else adapt_size(self, size)

    def searched(self, size: int) -> Found:
        """What can be searched at a size, in a network of the form of the teacher."""
        if size not in self._found:
            example = torch.zeros(1, self.pretrained.channels, size, size)
            self._found[size] = shrink.find(self.form, example, name=self.pretrained.name)
        return self._found[size]

    def check(self) -> None:
        """Refuse first what a later stage would: too few images, no BatchNorms to adapt, an absent runtime."""
        if self.cfg.latency_device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "latency_device is cuda, but torch sees no GPU: give onnx or cpu, or see `nasfast doctor`"
            )
        if self.cfg.latency_device == "onnx":
            try:
                require_onnx()
            except RuntimeError as error:
                raise ConfigError(f"{error}, or time PyTorch by --latency_device cpu") from error
        shrink.affine_parameters(self.form)
        self.check_samples(self.resolution)
        if self.cfg.peer is not None and self.cfg.comparison:
            shrink.affine_parameters(self.peer.model)

    def check_samples(self, size: int) -> None:
        """Refuse fewer images than `measure` needs at a size, before anything is trained."""
        (count, held), (needed, why) = self.samples, shrink.least_images(self.searched(size))
        if count < needed:
            raise ConfigError(
                f"{why}, of which {count} training images show too little: at least {needed} are needed besides the "
                f"{held} that compare networks; set measure_images to {needed} or more, held_out to less, or give more "
                "images"
            )

    def found(self, size: int) -> Found:
        """What can be searched in the full network, adapted at a size."""
        return replace(self.searched(size), model=self.at_size(size))

    def measured(self, size: int) -> Measured:
        """What was measured at a size."""
        if size not in self._measured:
            self._measured[size] = measure_size(self, size)
        return self._measured[size]

    @cached_property
    def samples(self) -> tuple[int, int]:
        """How many training images measure channels, and how many others compare whole networks."""
        held = min(self.cfg.held_out, len(self.images.train) // 4)
        return min(self.cfg.measure_images, len(self.images.train) - held), held

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        """Inputs at a size: those that measure channels, and the others."""
        count, held = self.samples
        if size not in self._samples:
            self._samples[size], _ = self.images.read(self.images.train, size, count + held)
        x = self.images.prepared(self._samples[size])
        return x[:-held], x[-held:]  # some of the first may be damaged files

    @cached_property
    def held_out(self) -> slice:
        """Where the images that compare whole networks are among the training images."""
        stop = sum(map(len, self.sample(self.resolution)))
        return slice(stop - self.samples[1], stop)

    @cached_property
    def reference(self) -> Tensor:
        """Logits of the labels of the held-out images."""
        return shrink.label_logits(self.train[1][self.held_out], self.images.classes)

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module, images: Tensor) -> float:
        """Cross entropy of a network on the held-out images at its size, at the best factor of its logits."""
        return shrink.divergence(self.reference, torch.cat([model(part) for part in images.split(32)]))


def adapt_teacher(work: Material) -> nn.Module:
    """The full network, adapted at the largest size; writes teacher.safetensors."""
    run, started = work.run, time.monotonic()
    path = run.dir / TEACHER_FILE
    model = clone(work.form)
    if (tensors := read_tensors(path, work.about)) is not None:
        model.load_state_dict(tensors)
    else:
        run.begin_writing()
        if shrink.last_linear(work.pretrained.model)[1].out_features != work.images.classes:
            model = clone(work.pretrained.model)
            fit_classifier(model, work.batches, work.images.classes)
        else:
            _LOG.info("the classifier has as many outputs as the images have classes: it is kept, and trained")
        work.teach(model, run.cfg.teacher_epochs, by_labels=True)
        save_tensors(path, dict(model.state_dict()), work.about)
        log_stage("adapt", started, f"the full network on {counted(len(work.images.train), 'image')}")
    return model.eval().requires_grad_(False)


def adapt_size(work: Material, size: int) -> nn.Module:
    """The full network after adaptation at a smaller size; writes size-N/full.safetensors."""
    path, model = work.run.dir / f"size-{size}" / "full.safetensors", clone(work.teacher)
    if (tensors := read_tensors(path, work.about)) is not None:
        model.load_state_dict(tensors)
    else:
        work.run.begin_writing()
        started = time.monotonic()
        work.teach(model, work.cfg.teacher_epochs, size=size, kept=work.kept_features(None))
        save_tensors(path, dict(model.state_dict()), work.about)
        log_stage("adapt", started, f"the full network at {size} px")
    return model.eval().requires_grad_(False)


def measure_size(work: Material, size: int) -> Measured:
    """Table, orders and weights at a size; writes size-N/."""
    folder, found = work.run.dir / f"size-{size}", work.found(size)
    if (measured := read_measured(folder, found, work.about)) is not None:
        return measured
    work.run.begin_writing()
    (images, _), started = work.sample(size), time.monotonic()
    measured = shrink.measure(found, images, score_images=work.cfg.score_images, seed=work.cfg.seed)
    save_measured(folder, measured, work.about)
    choices = sum(len(place.candidates) for place in found.places)
    log_stage("measure", started, f"{size} px: {choices} candidates of {len(found.places)} choices")
    return measured
