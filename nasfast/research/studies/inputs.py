"""What the configs of several studies take: threads and seeds, and modules of the user with the shape of a sample."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable

from torch import nn

from nasfast.config import ConfigError


def sample_shape(text: str) -> tuple[int, ...]:
    """Shape of one sample of a user's module.

    Args:
        text: such as "3,224,224".

    Raises:
        ConfigError: not a list of positive integers.
    """
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"input must be positive integers such as 3,224,224, got {text!r}")
    return shape


def maker(name: str) -> Callable[[], nn.Module]:
    """The function that makes the user's module anew for every setting.

    Args:
        name: `package.module:factory`.

    Raises:
        ConfigError: the name cannot be imported. The function raises it where the module cannot be made or is no
            nn.Module.
    """
    package, _, attribute = name.partition(":")
    if not package or not attribute:
        raise ConfigError(f"module must be package.module:factory, got {name!r}")
    # a script's own folder is on the path, a console command's is not
    if "" not in sys.path:
        sys.path.insert(0, "")
    # a user's code may raise anything
    try:
        source = importlib.import_module(package)
    except Exception as error:
        raise ConfigError(f"module {name!r}: cannot import {package}: {type(error).__name__}: {error}") from error
    found = getattr(source, attribute, None)
    if not callable(found):
        raise ConfigError(f"module {name!r}: {package} has no function {attribute!r}")

    def make() -> nn.Module:
        try:
            module = copy.deepcopy(found) if isinstance(found, nn.Module) else found()
        except Exception as error:
            raise ConfigError(
                f"module {name!r}: making it without arguments failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module {name!r} must return an nn.Module, got {type(module).__name__}")
        return module

    return make
