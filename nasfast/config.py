"""Base of the frozen dataclass configs: dict and YAML round trip, unknown keys raise and name the nearest valid one."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from typing import Self


class ConfigError(ValueError):
    """A configuration that cannot be used; the text says which key, what was given and what is allowed."""


def nearest(key: str, valid: typing.Iterable[str]) -> str:
    """The part of an error text that helps with a misspelt name: the nearest valid one and the whole list."""
    valid = sorted(valid)
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(valid)}"


@dataclasses.dataclass(frozen=True)
class ConfigBase:
    """Base of every frozen config dataclass.

    A field that is itself a config dataclass is written as a nested mapping. Values from a mapping are checked against
    the annotated type; a dataclass's own `__post_init__` checks ranges, so both ways in meet the same checks.

    Attributes:
        names_files: strings may name files; written and read so that they name the same ones under any locale.
    """

    names_files: typing.ClassVar[bool] = False

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, where: str = "") -> Self:
        """Build from a plain mapping.

        Args:
            mapping: field name -> value; absent fields keep their defaults.
            where: prefix of the key path in errors, e.g. `"train."`.

        Raises:
            ConfigError: unknown key (the nearest valid one is named), missing required key or wrong type.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{where.rstrip('.') or cls.__name__}: expected a mapping of keys, got {mapping!r}")
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        for key in mapping:
            if key not in fields:
                raise ConfigError(f"unknown config key '{where}{key}'; {nearest(str(key), fields)}")
        for name, f in fields.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in mapping:
                raise ConfigError(f"config key '{where}{name}' is required and was not given")
        try:
            return cls(**{k: _convert(v, hints[k], f"{where}{k}") for k, v in mapping.items()})
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where.rstrip('.') or cls.__name__}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of lists, mappings and scalars; `from_dict` of it gives an equal config."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML file (JSON is YAML).

        Raises:
            ConfigError: not YAML, or `from_dict`'s reasons, with the file named.
        """
        form = load_yaml(path)
        try:
            return cls.from_dict(local(form) if cls.names_files else form)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_yaml(self) -> str:
        """Every field, defaults included, as YAML; `load` reads it back from a file."""
        form = self.to_dict()
        return dump_yaml(portable(form) if self.names_files else form)

    def save(self, path: str | Path) -> None:
        """Write `to_yaml` to a file."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


_HEAD, _END = "# whole if its last line is three dots\n", "...\n"
"""First and last line of our YAML files: one that was cut off would be valid YAML too, with defaults for the rest."""


def dump_yaml(form: dict[str, Any]) -> str:
    """A mapping as YAML, in its own order; `load_yaml` notices when part of the text is missing."""
    return _HEAD + yaml.safe_dump(form, sort_keys=False, explicit_end=True)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file.

    Raises:
        ConfigError: file absent, empty, not YAML, not a mapping, or cut off.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    if _HEAD.startswith(text) or (text.startswith(_HEAD) and not text.endswith(f"\n{_END}")):
        what = "cut off" if text else "empty"
        raise ConfigError(f"{path} is {what}: restore it, or delete it and give the settings again")
    try:
        loaded = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a mapping at the top level, got {type(loaded).__name__}")
    return loaded


def portable(form: Any) -> Any:
    """A nested form whose strings may name files, as it is saved: the bytes of every name read as UTF-8.

    The same bytes are other strings under a locale that is not UTF-8; see `local`.
    """
    return _names(form, lambda name: os.fsencode(name).decode("utf-8", "surrogateescape"))


def local(form: Any) -> Any:
    """Inverse of `portable`: every string as the name that this process's locale gives to the same bytes."""
    return _names(form, lambda name: os.fsdecode(name.encode("utf-8", "surrogateescape")))


def _names(form: Any, change: Callable[[str], str]) -> Any:
    if isinstance(form, dict):
        return {key: _names(value, change) for key, value in form.items()}
    if isinstance(form, list):
        return [_names(value, change) for value in form]
    if isinstance(form, str):
        with contextlib.suppress(UnicodeEncodeError):  # a text that is no file name here
            return change(form)
    return form


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """The keys in which two nested settings differ, with both values; empty if they are equal."""
    parts = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            parts += [text for text in [difference(before, after, f"{prefix}{key}.")] if text]
        elif before != after:
            parts.append(f"{prefix}{key} was {before!r}, now {after!r}")
    return "; ".join(parts)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check `value` against a type annotation, converting YAML's lists and ints where the annotation asks for more."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else hint.from_dict(value, where=where + ".")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in args:
            if option is not type(None):
                try:
                    return _convert(value, option, where)
                except ConfigError as error:
                    errors.append(str(error))
        raise ConfigError(errors[0])
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"config key '{where}': got {value!r}, allowed: {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"config key '{where}': expected a list, got {value!r}")
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if len(inner) != len(value):
            raise ConfigError(f"config key '{where}': expected {len(inner)} values, got {len(value)}")
        return tuple(_convert(v, h, f"{where}[{i}]") for i, (v, h) in enumerate(zip(value, inner, strict=True)))
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 4e-5 and 475e6 as text because they have no dot
        try:
            return float(value)
        except ValueError:
            pass
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is Any:
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"config key '{where}': expected {hint.__name__}, got {value!r}")
    return value
