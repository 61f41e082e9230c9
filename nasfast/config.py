"""Base of the frozen dataclass configs: conversion to and from dicts and YAML; unknown keys raise with a suggestion."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import numbers
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml


class ConfigError(ValueError):
    """A configuration cannot be used; the text says which key, what was given and what is allowed."""


class Number(float):
    """Annotation, beside float, of a number that may have K, M or G behind it, as in 2.4M; configs make it a float."""


def nearest(key: str, valid: typing.Iterable[str]) -> str:
    """The part of an error text that helps with a misspelt name: the nearest valid name and the list of all."""
    valid = sorted(valid)
    hint = suggestion(key, valid)
    return f"{hint}{' ' if hint else ''}valid: {', '.join(valid)}"


def suggestion(key: str, valid: typing.Iterable[str]) -> str:
    """A question for the valid names nearest to a misspelt one, equally near ones in order; empty if none is."""
    ratios = {name: difflib.SequenceMatcher(None, key, name).ratio() for name in sorted(valid)}
    best = max(ratios.values(), default=0)
    names = [repr(name) for name, ratio in ratios.items() if ratio == best]
    return f"did you mean {' or '.join(names)}?" if best >= 0.6 else ""


def check_keys(given: typing.Iterable[Any], valid: typing.Iterable[str], *, what: str = "key", where: str = "") -> None:
    """Raise ConfigError for the first key that is not valid; the text has the nearest one."""
    valid = set(valid)
    for key in given:
        if key not in valid:
            raise ConfigError(f"unknown {what} '{where}{key}'; {nearest(str(key), valid)}")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for pairs of json.loads, which refuses a key that is there twice: one value would be lost."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r} is there twice: keep one")
    return mapping


@dataclasses.dataclass(frozen=True)
class ConfigBase:
    """Base of every frozen config dataclass.

    A field that is itself a config dataclass is written as a nested mapping. Every value, from a file or from Python,
    is checked against the annotated type and converted to it: a list to a tuple, "2.4M" to a number, a mapping to a
    config. A dataclass checks ranges in its `_check_values`.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        hints = _hints(kind)
        for f in dataclasses.fields(self):
            if f.init:
                # the dataclass is frozen: an ordinary assignment is refused
                value = _fill_defaults(f, getattr(self, f.name))
                object.__setattr__(self, f.name, _convert(value, hints[f.name], f.name))
        self._check_values()

    def _check_values(self) -> None:
        """Raise ValueError for values that are out of range or contradict each other."""

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, where: str = "") -> Self:
        """Build from a plain mapping; absent fields keep their defaults, in nested mappings too.

        `where` is the prefix of the keys in errors, e.g. `"train."`.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{where.rstrip('.') or cls.__name__}: expected a mapping of keys, got {mapping!r}")
        kind: Any = cls
        hints = _hints(kind)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        check_keys(mapping, fields, what="config key", where=where)
        for name, f in fields.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in mapping:
                raise ConfigError(f"config key '{where}{name}' is required and was not given: add it")
        try:
            return cls(
                **{k: _convert(_fill_defaults(fields[k], v), hints[k], f"{where}{k}") for k, v in mapping.items()}
            )
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where.rstrip('.')}: {error}" if where else str(error)) from error

    def to_dict(self) -> dict[str, Any]:
        """The config as a nested dict of lists, dicts and scalars; `from_dict` makes an equal config of it."""
        return {f.name: _to_plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}

    def parted(self, *kinds: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """`to_dict` in two parts, which `merge` joins: without the settings that are `marked` by a kind, and these."""
        rest, taken = self.to_dict(), dict[str, Any]()
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.metadata.get("kind") in kinds:
                taken[f.name] = rest.pop(f.name)
            elif isinstance(value, ConfigBase):
                rest[f.name], inner = value.parted(*kinds)
                taken |= {f.name: inner} if inner else {}
        return rest, taken

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML file (JSON is YAML too); ConfigError, which names the file, where it cannot be used."""
        mapping = load_yaml(path)
        try:
            return cls.from_dict(mapping)
        except ConfigError as error:
            raise type(error)(f"{path}: {error}") from error

    def to_yaml(self) -> str:
        """All fields, defaults included, as YAML that `load` can read."""
        return dump_yaml(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write `to_yaml` to a file."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def marked(kind: str, default: Any) -> Any:
    """A field with a default that is of a kind, such as one of the settings that may change when a run resumes."""
    return dataclasses.field(default=default, metadata={"kind": kind})


_HEAD, _END = "# whole if its last line is three dots\n", "...\n"
"""First and last line of our YAML files. Without them a truncated file would be valid YAML and take defaults."""


def dump_yaml(mapping: dict[str, Any]) -> str:
    """A mapping as YAML, with its keys in their order; `load_yaml` detects a truncated text."""
    return _HEAD + yaml.safe_dump(mapping, sort_keys=False, explicit_end=True)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file; ConfigError where the file cannot be used."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}): give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    if _HEAD.startswith(text) or (text.startswith(_HEAD) and not text.endswith(f"\n{_END}")):
        what = "truncated" if text else "empty"
        raise ConfigError(f"{path} is {what}: restore it, or delete it and give the settings again")
    try:
        loaded = _parse_yaml(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML{_yaml_problem(error)}: correct the line") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a mapping at the top level, got {type(loaded).__name__}")
    return loaded


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Where a YAML text is wrong and why, as a part of a sentence."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None)  # the other of a forbidden character
    return (f" at line {mark.line + 1}, column {mark.column + 1}" if mark else "") + (
        f" ({problem})" if problem else ""
    )


class _UniqueKeys:
    """Of a YAML loader: refuses a key that a mapping has twice, of which one value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen = set[str]()
        for key, _ in node.value:
            # keys that are merged by << may be replaced
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[misc]  # of the loader


class _Loader(_UniqueKeys, yaml.SafeLoader):
    pass


class _QuickLoader(_UniqueKeys, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The parser in C where there is one, which takes a tenth of the time."""


def _parse_yaml(text: str) -> Any:
    """A YAML text as plain values."""
    try:
        return yaml.load(text, Loader=_QuickLoader)
    except yaml.constructor.ConstructorError:
        raise
    except yaml.YAMLError:
        # the parser in C refuses the halves of surrogate pairs, which names of files that are not UTF-8 have
        return yaml.load(text, Loader=_Loader)


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """Text that names the keys in which two nested settings differ, with both values; empty if they are equal."""
    parts = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            parts += [text for text in [difference(before, after, f"{prefix}{key}.")] if text]
        elif before != after:
            parts.append(f"{prefix}{key} was {before!r}, now {after!r}")
    return "; ".join(parts)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their flags: `{"search": {"top_k": 1}}` -> `{"search.top_k": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@functools.cache
def _hints(config: Any) -> dict[str, Any]:
    return typing.get_type_hints(config)


_SUFFIXES = {"K": 3, "M": 6, "G": 9}


def to_number(value: Any) -> float:
    """A number, also from a text such as 475e6 or 2.4M: K, M and G are thousands, millions and 10^9."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([KMG])", value) if isinstance(value, str) else None
    return float(f"{match[1]}e{_SUFFIXES[match[2]]}" if match else value)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A nested mapping with the values of `changes` in place of its own."""
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def _to_plain(value: Any) -> Any:
    """A value as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, (list, tuple)):
        return [_to_plain(v) for v in value]
    return value


def _fill_defaults(field: dataclasses.Field[Any], value: Any) -> Any:
    """A value; of a nested config, a mapping with the field's default in place of what it leaves out."""
    default: Any = field.default
    nested = isinstance(default, ConfigBase) and isinstance(value, Mapping)
    return merge(default.to_dict(), value) if nested else value


def describe_type(hint: Any) -> str:
    """What a setting of this type takes, in words."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        plain = [describe_type(option) for option in args if option is not type(None)]
        return " or ".join(dict.fromkeys(plain)) + (" (or null)" if type(None) in args else "")
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(str, args))}"
    if typing.get_origin(hint) is tuple:
        count = "" if Ellipsis in args else f" of {len(args)}"
        return f"a list{count} in brackets, as '[1, 2, 3]', each {describe_type(args[0])}"
    number = "a number, such as 0.5, 475e6 or 2.4M"
    names = {int: "a whole number", bool: "true or false", str: "a text", float: number, Number: number}
    return names.get(hint, hint.__name__)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check `value` against a type annotation; convert YAML's lists and numbers to the annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, ConfigBase):
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
            hint = suggestion(str(value), map(str, args))
            allowed = ", ".join(map(repr, args)) + (f"; {hint}" if hint else "")
            raise ConfigError(f"config key '{where}': got {value!r}, allowed: {allowed}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            example = f" such as [{value}]" if isinstance(value, (str, int, float)) else ""
            raise ConfigError(f"config key '{where}': expected a list{example}, got {value!r}")
        hints = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if len(hints) != len(value):
            raise ConfigError(f"config key '{where}': expected {len(hints)} values, got {len(value)}")
        return tuple(_convert(v, h, f"{where}[{i}]") for i, (v, h) in enumerate(zip(value, hints, strict=True)))
    if hint in (float, Number) and isinstance(value, str):
        # YAML 1.1 reads 4e-5 and 475e6 as strings, because they have no dot
        with contextlib.suppress(ValueError):
            return to_number(value)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)  # numbers of NumPy too
    if hint in (float, Number) and real:
        return float(value)
    if hint is int and real and float(value).is_integer():
        return int(value)
    if hint is Any:
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"config key '{where}': expected {describe_type(hint)}, got {value!r}")
    return value
