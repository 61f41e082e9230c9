"""What several studies measure: a search space at a small resolution, or a module of the user."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from nasfast.config import ConfigError
from nasfast.spaces import SearchSpace, get_space
from nasfast.supernet import Init, initialize

Result = TypeVar("Result")

# Larger images change nothing but the borders, and cost in proportion to their area.
_RESOLUTION = 64


def reduced_space(name: str, resolution: int | None, study: str) -> SearchSpace:
    """A space at a resolution in pixels; None takes 64, or the space's if that is smaller."""
    space = get_space(name)
    space.require_one_activation(f"the study of {study}")
    return get_space(name, resolution=resolution or min(_RESOLUTION, space.resolution))


def sample_shape(text: str) -> tuple[int, ...]:
    """Shape of one sample of a user's module, from a text such as "3,224,224"."""
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"input must be positive integers such as 3,224,224, got {text!r}")
    return shape


def _import_source(name: str) -> Any:
    """The user's module, or the function that makes it, of a name `package.module:factory`."""
    package, _, attribute = name.partition(":")
    if not package or not attribute:
        raise ConfigError(f"module must be package.module:factory, got {name!r}")
    # a script's own folder is on the path, a console command's is not
    if "" not in sys.path:
        sys.path.insert(0, "")
    # a user's code may raise anything
    try:
        return getattr(importlib.import_module(package), attribute)
    except Exception as error:
        raise ConfigError(f"module {name!r}: cannot import it: {type(error).__name__}: {error}") from error


def _make_module(name: str, source: Any) -> nn.Module:
    """A new module from what `_import_source` returned."""
    try:
        module = copy.deepcopy(source) if isinstance(source, nn.Module) else source()
    except Exception as error:
        raise ConfigError(
            f"module {name!r}: making it without arguments failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module {name!r} must return an nn.Module, got {type(module).__name__}")
    return module


def measure_inits(name: str, shape: str, seed: int, measure: Callable[[str, nn.Module], Result]) -> dict[str, Result]:
    """What `measure(setting, module)` makes of a user's module as it is, and with orthogonal and Gaussian weights.

    The name is `package.module:factory`, and the shape of a sample is for messages.
    """
    source = _import_source(name)
    settings: dict[str, Init | None] = {"as it is": None, "orthogonal": "orthogonal", "gaussian": "gaussian"}
    results = {}
    for setting, init in settings.items():
        module = _make_module(name, source)
        try:
            if init is not None:
                initialize(module, init, seed=seed)
            results[setting] = measure(setting, module)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"module {name!r}, input {shape}, {setting}: {error}") from error
    return results
