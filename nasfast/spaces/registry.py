"""The one registry of search spaces: kinds, built-in names, and the one reader of their files. No torch.

A new space of layers is a function in `builders.py` and a line in `BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from nasfast import extensions
from nasfast.config import ConfigError, load_yaml, nearest
from nasfast.spaces.arch_space import ArchSpace
from nasfast.spaces.builders import (
    digits_macro,
    digits_mini,
    mobilenet_v2,
    mobilenet_v3,
    nas_bench_macro,
    shufflenet_v2,
)
from nasfast.spaces.module_space import ModuleSpace
from nasfast.spaces.space import SearchSpace


def _later(entry: str) -> Callable[..., ArchSpace]:
    """A builder that imports what an entry of `nasfast.extensions` names when it is called."""
    return lambda **changes: extensions.load(entry)(**changes)


BUILDERS: dict[str, Callable[..., ArchSpace]] = {
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3": mobilenet_v3,
    "shufflenet_v2": shufflenet_v2,
    "nas_bench_macro": nas_bench_macro,
    "digits_macro": digits_macro,
    "digits_mini": digits_mini,
    **{name: _later(entry) for name, entry in extensions.SPACES.items()},
}
"""Built-in name -> builder. Every builder takes `num_classes` and `resolution`, both with defaults."""


def list_spaces() -> list[str]:
    """The built-in names that `get_space` and `named_space` take."""
    return sorted(BUILDERS)


def space_kind(form: Mapping[str, Any]) -> type[ArchSpace]:
    """The class of a space by its written form, which has the `KEY` of one kind.

    Raises:
        ConfigError: it has no kind's key; the text names the first key that no kind has.
    """
    if SearchSpace.KEY in form:
        return SearchSpace
    if ModuleSpace.KEY in form:
        return ModuleSpace
    for key, entry in extensions.SPACE_KINDS.items():
        if key in form:
            return extensions.load(entry)
    kinds = [SearchSpace, *map(extensions.load, extensions.SPACE_KINDS.values())]
    known = sorted({field.name for kind in kinds for field in fields(kind)})
    for key in form:
        if key not in known:
            raise ConfigError(f"unknown config key {key!r}; {nearest(str(key), known)}")
    raise ConfigError(f"a space must have one of the keys {', '.join(repr(kind.KEY) for kind in kinds)}")


def read_space(path: str | Path) -> ArchSpace:
    """Read a space of any kind from its YAML or JSON file; docs/spaces.md has an example.

    Raises:
        ConfigError: unreadable, unknown key (the nearest is named), wrong type or an impossible space.
    """
    form = load_yaml(path)
    try:
        kind = space_kind(form)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return kind.load(path)


def names_file(name: str) -> bool:
    """Whether a space is named by the path of its YAML file."""
    return name.endswith((".yaml", ".yml", ".json")) or Path(name).is_file()


def named_space(name: str, **changes: Any) -> ArchSpace:
    """The space, of any kind, of a built-in name or of a YAML file.

    Args:
        name: a key of `BUILDERS`, or a path.
        changes: arguments of the builder, or fields of the file's space.

    Raises:
        ConfigError: neither a built-in name (the nearest is named) nor a readable YAML file.
    """
    if names_file(name):
        return read_space(name).replace(**changes)
    if name not in BUILDERS:
        raise ConfigError(f"unknown space {name!r}: neither a YAML file nor built in; {nearest(name, BUILDERS)}")
    return BUILDERS[name](**changes)


def get_space(
    name: str, *, num_classes: int | None = None, resolution: int | None = None, variant: str | None = None
) -> SearchSpace:
    """The layer-wise space of a built-in name or of a YAML file; None keeps the space's own value.

    Raises:
        ConfigError: neither a built-in name (the nearest is named) nor a readable YAML file, a space of cells, or a
            variant of a space that has none.
    """
    given = {"num_classes": num_classes, "resolution": resolution, "variant": variant}
    if variant is not None and name != "mobilenet_v2":
        raise ConfigError(f"space.variant={variant!r}: only mobilenet_v2 has variants, not {name}")
    space = named_space(name, **{key: value for key, value in given.items() if value is not None})
    if isinstance(space, ModuleSpace):
        raise ConfigError(
            f"space {name!r} is that of a Python module, which no command can build: go on in Python (docs/choice.md)"
        )
    if not isinstance(space, SearchSpace):
        layerwise = [key for key, build in BUILDERS.items() if build().LAYERWISE]
        raise ConfigError(
            f"space {name!r} is a space of cells, and this needs a layer-wise one: {', '.join(layerwise)}, or a YAML "
            "file with `stages`"
        )
    return space
