"""Pretrained networks by name, from torchvision, timm, a user's file or a run, and a classifier for other classes."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.config import ConfigError, suggestion
from nasfast.pipeline.shrinking.files import clone
from nasfast.pipeline.shrinking.run import parse_model_name
from nasfast.retrain import load_model
from nasfast.runtime.imports import import_modules
from nasfast.settings import DataConfig
from nasfast.shrink import last_linear
from nasfast.supernet import ArchNetwork

_LOG = logging.getLogger(__name__)

_RESOLUTION = 224
_DECAYS = (1e-3, 1e-2, 1e-1, 1.0)
"""Weight decays of a new classifier, of which held-out features choose one."""

_ITERATIONS = 100
"""Most iterations of L-BFGS for a new classifier; 20 to 40 were enough for Imagenette."""


@dataclass(frozen=True)
class Pretrained:
    """A network and what its images are like.

    Attributes:
        name: as the user gave it.
        model: in evaluation mode on the CPU.
        resolution: side of the images in pixels that it was trained with, as far as it is known.
        mean, std: of its normalisation; None where it says nothing.
        channels: of its images.
    """

    name: str
    model: nn.Module
    resolution: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    channels: int

    def data(self, cfg: DataConfig) -> DataConfig:
        """The settings of images, with the network's normalisation unless the user gave one."""
        given = (cfg.mean, cfg.std) != (DataConfig.mean, DataConfig.std)
        if given or self.mean is None or self.std is None or len(self.mean) != 3:
            return cfg
        return cfg.replace(mean=self.mean, std=self.std)


def load_pretrained(name: str, weights: str | None) -> Pretrained:
    """The network of a name, with weights of a file, or the published ones.

    Raises:
        ConfigError: there is no such network, its weights cannot be had, or the file is of another network.
        RuntimeError: timm is needed and not installed.
    """
    source, inner = parse_model_name(name)
    makers: dict[str, Callable[[str, bool], nn.Module]] = {
        "torchvision": _torchvision,
        "timm": _timm,
        "folder": _trained,
    }
    make = makers.get(source, _own(source))
    model = make(inner, weights is None).cpu().float().eval()
    if weights is not None:
        _load_weights(model, Path(weights))
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        raise ConfigError(f"{name} has no convolution: give a network of residual blocks with convolutions")
    return Pretrained(name, model, *_images_of(model), first.in_channels)


def _images_of(model: nn.Module) -> tuple[int, tuple[float, ...] | None, tuple[float, ...] | None]:
    """Side, mean and deviation of the images of a network, as far as it says them."""
    if isinstance(model, ArchNetwork):
        images = model.images
        if images is None:
            return model.space.resolution, None, None
        repeats = 3 // len(images.mean)  # settings have three values for grey images, too
        return images.resolution, repeats * images.mean, repeats * images.std
    said: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    said = said if isinstance(said, Mapping) else vars(said)
    size = said.get("input_size") or (3, _RESOLUTION, _RESOLUTION)
    mean, std = (tuple(map(float, said[key])) if said.get(key) else None for key in ("mean", "std"))
    return int(size[-1]), mean, std


def _torchvision(name: str, pretrained: bool) -> nn.Module:
    from torchvision import models

    try:
        get: Any = models.get_model
        if pretrained:
            _LOG.info("torchvision:%s: its published weights are downloaded unless they are in the cache", name)
        return get(name, weights="DEFAULT" if pretrained else None)
    except ValueError as error:
        raise _unknown("torchvision", name, models.list_models(module=models), "torchvision.models") from error
    except OSError as error:
        raise _no_weights(f"torchvision:{name}", error) from error


def _timm(name: str, pretrained: bool) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise RuntimeError(f"timm:{name} needs timm: pip install timm") from error
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models(), "timm")
    try:
        if pretrained:
            _LOG.info("timm:%s: its published weights are downloaded unless they are in the cache", name)
        return timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # the hub raises its own errors, of several packages
        raise _no_weights(f"timm:{name}", error) from error


def _unknown(package: str, name: str, names: list[str], module: str) -> ConfigError:
    hint = suggestion(name, names)
    return ConfigError(f"{package} has no model {name!r}: {module}.list_models() has all{f'; {hint}' if hint else ''}")


def _no_weights(name: str, error: Exception) -> ConfigError:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return ConfigError(f"the weights of {name} cannot be had ({line}): give a file of them by --weights FILE")


def _trained(folder: str, _: bool) -> nn.Module:
    try:
        return load_model(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"model {folder}: {error}; the networks of a run are in RUN/retrain/NAME") from error


def _own(file: str) -> Callable[[str, bool], nn.Module]:
    def make(function: str, pretrained: bool) -> nn.Module:
        import_modules([file])
        found = getattr(sys.modules[Path(file).stem], function, None)
        if not callable(found):
            raise ConfigError(f"{file} has no function {function!r}: give FILE.py:FUNCTION of one without arguments")
        try:
            model = found()
        except Exception as error:  # the user's code raises anything
            raise ConfigError(f"{file}:{function} failed ({type(error).__name__}: {error})") from error
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{file}:{function} returned {type(model).__name__}: let it return an nn.Module")
        return model

    return make


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict; if the names differ, the tensors are taken in order, where all their shapes agree.

    How many batches each BatchNorm has seen may be absent, as in older files.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise anything
        raise ConfigError(f"weights {path} cannot be read ({type(error).__name__}): give a state dict") from error
    for key in ("state_dict", "model"):
        state = state[key] if isinstance(state, Mapping) and isinstance(state.get(key), Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"weights {path} is no state dict: save one by torch.save(model.state_dict(), FILE)")
    state = {name.removeprefix("module."): value for name, value in state.items()}
    path_, classifier = last_linear(model)
    trained = state.get(f"{path_}.weight")
    if (
        trained is not None
        and trained.shape[1:] == (classifier.in_features,)
        and len(trained) != len(classifier.weight)
    ):
        _LOG.info("%s has %d classes, and so the model gets as many", path, len(trained))
        model.set_submodule(path_, nn.Linear(classifier.in_features, len(trained), classifier.bias is not None))
    whole = model.state_dict()
    own, given = _without_counts(whole), _without_counts(state)
    if given.keys() != own.keys():
        pairs = list(zip(own.items(), given.values(), strict=False))
        if len(own) != len(given) or any(a.shape != b.shape for (_, a), b in pairs):
            names = [name for name in own if name not in given] or [name for name in given if name not in own]
            raise ConfigError(
                f"weights {path} are of another network: besides counts of batches, it has {len(given)} tensors, the "
                f"model {len(own)}, and e.g. {names[0]} is in one alone: give those of this model"
            )
        _LOG.info("%s has other names: its tensors are taken in order, because all shapes agree", path)
        state = {name: b for (name, _), b in pairs}
    try:
        model.load_state_dict({name: state.get(name, tensor) for name, tensor in whole.items()})
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise ConfigError(f"weights {path} do not fit the model ({line}): give those of this model") from error


def _without_counts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


def with_classes(model: nn.Module, classes: int) -> nn.Module:
    """A copy in evaluation mode whose classifier has so many classes; a new one has random weights."""
    model = clone(model)
    path, old = last_linear(model)
    if old.out_features != classes:
        model.set_submodule(path, nn.Linear(old.in_features, classes))
    return model.eval()


def per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Mean or deviation of each channel; a grey image has the mean of the three."""
    return values if channels == 3 else (sum(values) / len(values),)


class Renormalised(nn.Module):
    """A network that gets images with the normalisation of another one.

    Args:
        model: the network.
        given: settings of the images that come.
        wanted: settings of the images that it was trained with.
        channels: of the images.
    """

    def __init__(self, model: nn.Module, given: DataConfig, wanted: DataConfig, channels: int) -> None:
        super().__init__()
        self.model = model
        stds, means = (
            [torch.tensor(per_channel(v, channels)).view(1, -1, 1, 1) for v in pair]
            for pair in ((given.std, wanted.std), (given.mean, wanted.mean))
        )
        self.register_buffer("factor", stds[0] / stds[1])
        self.register_buffer("offset", (means[0] - means[1]) / stds[1])

    def forward(self, x: Tensor) -> Tensor:
        factor: Any = self.factor
        return self.model(x * factor + self.offset)


def fit_classifier(model: nn.Module, batches: Callable[[], Any], classes: int, *, seed: int = 0) -> None:
    """Replace a network's classifier by one of so many classes, fitted on features that are computed once, in place.

    The features are those of images as they are. A quarter of them is held out to choose the weight decay.

    Args:
        model: the network.
        batches: gives batches of images and labels.
        classes: outputs of the classifier.
        seed: seed of what is held out.
    """
    path, old = last_linear(model)
    seen, labels = [], []
    handle = old.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))
    with torch.no_grad():
        for images, target in batches():
            model(images)
            labels.append(target)
    handle.remove()
    x, y = torch.cat(seen).float(), torch.cat(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, rest = order[: len(x) // 4], order[len(x) // 4 :]
    scores = {}
    for decay in _DECAYS:
        layer = _logistic(x[rest], y[rest], classes, decay)
        with torch.no_grad():
            scores[decay] = nn.functional.cross_entropy(layer(x[held]), y[held]).item()
    decay = min(_DECAYS, key=lambda d: scores[d])
    model.set_submodule(path, _logistic(x, y, classes, decay))


def _logistic(x: Tensor, y: Tensor, classes: int, decay: float) -> nn.Linear:
    """A linear layer of least cross entropy plus decay times the mean square of its weights, by standardised inputs."""
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    inputs = (x - mean) / std
    layer = nn.Linear(x.shape[1], classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=_ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(layer(inputs), y) + decay * layer.weight.square().sum() / classes
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        layer.weight.div_(std)
        layer.bias.sub_(layer.weight @ mean)
    return layer.requires_grad_(True)
