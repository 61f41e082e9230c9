"""The built-in search spaces, as data, and the one reader of the files of spaces. No torch.

A new space of layers is a function here and a line in `BUILDERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, Literal

from nasfast import extensions
from nasfast.config import ConfigError, load_yaml, nearest
from nasfast.spaces.arch_space import ArchSpace
from nasfast.spaces.blocks import Activation, Block, SqueezeExcite
from nasfast.spaces.module_space import ModuleSpace
from nasfast.spaces.space import FixedLayer, SearchSpace, Stage

_MBCONV_CHOICES = tuple(Block("mbconv", kernel=k, expand=e) for k in (3, 5, 7) for e in (3, 6))
_MACRO_CHOICES = (Block("identity"), Block("mbconv", kernel=3, expand=3), Block("mbconv", kernel=5, expand=6))
_SHUFFLE_CHOICES = (*(Block("shuffle", kernel=k) for k in (3, 5, 7)), Block("shuffle_xception", kernel=3))


def mobilenet_v2(
    *, num_classes: int = 1000, resolution: int = 224, variant: Literal["default", "bnnas"] = "default"
) -> SearchSpace:
    """The 6^20 MobileNetV2 space of BN-NAS: k in {3, 5, 7} x e in {3, 6}, k-major (0 = k3 e3, 1 = k3 e6, 2 = k5 e3).

    `variant="bnnas"` is the released configuration: 21 slots (the 432-channel layer is searched too), of which 1, 5, 6
    and 9 are pinned to the identity.
    """
    if variant not in ("default", "bnnas"):
        raise ValueError(f"mobilenet_v2: variant must be 'default' or 'bnnas', got {variant!r}")
    released = variant == "bnnas"
    pinned: tuple[tuple[int, ...], ...] = ((1,), (1, 2), (1,), (), ()) if released else ((),) * 5
    shapes = ((32, 4, 2), (56, 4, 2), (112, 4, 2), (128, 4, 1), (256, 4, 2))
    stages = tuple(Stage(c, n, s, _MBCONV_CHOICES, p) for (c, n, s), p in zip(shapes, pinned, strict=True))
    last = FixedLayer(Block("conv", kernel=1), 1728)
    return SearchSpace(
        name="mobilenet_v2_bnnas" if released else "mobilenet_v2",
        resolution=resolution,
        num_classes=num_classes,
        stem=(FixedLayer(Block("conv", kernel=3), 40, stride=2), FixedLayer(Block("mbconv", kernel=3, expand=1), 24)),
        stages=(*stages, Stage(432, 1, 1, _MBCONV_CHOICES)) if released else stages,
        head=(last,) if released else (FixedLayer(Block("mbconv", kernel=3, expand=3), 432), last),
        activation="relu6",
    )


def mobilenet_v2_x0_5(*, num_classes: int = 1000, resolution: int = 224) -> SearchSpace:
    """`mobilenet_v2` at the width multiplier 0.5 (Sandler et al. 2018), whose normal layers may be skipped, too.

    Widths are multiples of 8. At 224 x 224 pixels its architectures have 61 to 340 million MACs.
    """
    wide = mobilenet_v2(num_classes=num_classes, resolution=resolution)
    stages = []
    for stage, out in zip(wide.stages, (16, 32, 56, 64, 128), strict=True):
        stages += [
            stage.replace(out=out, layers=1),
            Stage(out, stage.layers - 1, 1, (Block("identity"), *stage.choices)),
        ]
    return wide.replace(
        name="mobilenet_v2_x0_5",
        stem=tuple(layer.replace(out=out) for layer, out in zip(wide.stem, (24, 16), strict=True)),
        stages=tuple(stages),
        head=tuple(layer.replace(out=out) for layer, out in zip(wide.head, (216, 864), strict=True)),
    )


def shufflenet_v2(*, num_classes: int = 1000, resolution: int = 224) -> SearchSpace:
    """The 4^20 ShuffleNetV2 space of Single Path One-Shot: k3, k5, k7, Xception."""
    shapes = ((64, 4), (160, 4), (320, 8), (640, 4))
    return SearchSpace(
        name="shufflenet_v2",
        resolution=resolution,
        num_classes=num_classes,
        stem=(FixedLayer(Block("conv", kernel=3), 16, stride=2),),
        stages=tuple(Stage(c, n, 2, _SHUFFLE_CHOICES) for c, n in shapes),
        head=(FixedLayer(Block("conv", kernel=1), 1024),),
        activation="relu",
        classifier_bias=False,
    )


def mobilenet_v3(*, num_classes: int = 1000, resolution: int = 224) -> SearchSpace:
    """A space around MobileNetV3-Large (Howard et al. 2019, arXiv 1905.02244): kernel x expansion x SE in 14 layers.

    Kernels are 3 and 5. A stage has two or three expansions, those of MobileNetV3-Large among them. The candidates of
    an expansion and a kernel are one without and one with squeeze-and-excitation, in this order. Widths, activations,
    stem and head are those of MobileNetV3-Large as torchvision builds it, so one architecture has its cost.
    """
    widths: list[tuple[int, int, int, tuple[float, ...], Activation | None]] = [
        (24, 2, 2, (3, 4), "relu"),
        (40, 3, 2, (3, 6), "relu"),
        (80, 4, 2, (2.3, 2.5, 6), None),
        (112, 2, 1, (3, 6), None),
        (160, 3, 2, (3, 6), None),
    ]
    stages = []
    for out, layers, stride, expansions, activation in widths:
        choices = product((3, 5), expansions, (None, SqueezeExcite()))
        blocks = tuple(Block("mbconv", kernel=k, expand=e, se=se) for k, e, se in choices)
        stages.append(Stage(out, layers, stride, blocks, activation=activation))
    return SearchSpace(
        name="mobilenet_v3",
        resolution=resolution,
        num_classes=num_classes,
        stem=(
            FixedLayer(Block("conv", kernel=3), 16, stride=2),
            FixedLayer(Block("mbconv", kernel=3, expand=1), 16, activation="relu"),
        ),
        stages=tuple(stages),
        head=(FixedLayer(Block("conv", kernel=1), 960), FixedLayer(Block("hidden"), 1280)),
        activation="hswish",
    )


def nas_bench_macro(*, num_classes: int = 10, resolution: int = 32) -> SearchSpace:
    """The 3^8 space of NAS-Bench-Macro (CIFAR-10): identity, k3 e3, k5 e6; trained accuracies of all are published.

    The networks of the benchmark were trained with ReLU, so that is its activation.
    """
    return SearchSpace(
        name="nas_bench_macro",
        resolution=resolution,
        num_classes=num_classes,
        stem=(FixedLayer(Block("conv", kernel=3), 32),),
        stages=tuple(Stage(c, n, 2, _MACRO_CHOICES) for c, n in ((64, 2), (128, 3), (256, 3))),
        head=(FixedLayer(Block("conv", kernel=1), 1280),),
        activation="relu",
    )


def digits_macro(*, num_classes: int = 10, resolution: int = 32) -> SearchSpace:
    """A quarter of NAS-Bench-Macro's widths behind a stem of stride 2 (3^8), for the demo: 0.15 to 2.3 million MACs.

    Each layer may be the identity, so architectures of equal cost spend their MACs early or late, in few wide blocks or
    many narrow ones.
    """
    return SearchSpace(
        name="digits_macro",
        resolution=resolution,
        num_classes=num_classes,
        stem=(FixedLayer(Block("conv", kernel=3), 12, stride=2),),
        stages=tuple(Stage(c, n, 2, _MACRO_CHOICES) for c, n in ((16, 2), (32, 3), (64, 3))),
        head=(FixedLayer(Block("conv", kernel=1), 160),),
        activation="relu",
    )


def digits_mini(*, num_classes: int = 10, resolution: int = 32) -> SearchSpace:
    """A small MobileNetV2 space (6^6) for tests: minutes on a laptop."""
    return SearchSpace(
        name="digits_mini",
        resolution=resolution,
        num_classes=num_classes,
        stem=(FixedLayer(Block("conv", kernel=3), 16, stride=2),),
        stages=tuple(Stage(c, n, 2, _MBCONV_CHOICES) for c, n in ((24, 3), (40, 3))),
        head=(FixedLayer(Block("conv", kernel=1), 160),),
        activation="relu6",
    )


def _later(entry: str) -> Callable[..., ArchSpace]:
    """A builder that imports what an entry of `nasfast.extensions` names when it is called."""
    return lambda **changes: extensions.load(entry)(**changes)


BUILDERS: dict[str, Callable[..., ArchSpace]] = {
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v2_x0_5": mobilenet_v2_x0_5,
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


def space_kind(data: Mapping[str, Any]) -> type[ArchSpace]:
    """The class of a space by its written form, which has the `KEY` of one kind.

    Raises:
        ConfigError: it has no kind's key; the text names the first key that no kind has.
    """
    if SearchSpace.KEY in data:
        return SearchSpace
    if ModuleSpace.KEY in data:
        return ModuleSpace
    for key, entry in extensions.SPACE_KINDS.items():
        if key in data:
            return extensions.load(entry)
    kinds = [SearchSpace, *map(extensions.load, extensions.SPACE_KINDS.values())]
    keys = sorted({field.name for kind in kinds for field in fields(kind)})
    for key in data:
        if key not in keys:
            raise ConfigError(f"unknown config key {key!r}; {nearest(str(key), keys)}")
    raise ConfigError(f"a space must have one of the keys {', '.join(repr(kind.KEY) for kind in kinds)}")


def read_space(path: str | Path) -> ArchSpace:
    """Read a space of any kind from its YAML or JSON file; docs/spaces.md has an example.

    Raises:
        ConfigError: unreadable, unknown key (the nearest is named), wrong type or an impossible space.
    """
    data = load_yaml(path)
    try:
        kind = space_kind(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return kind.load(path)


def named_space(name: str, **changes: Any) -> ArchSpace:
    """The space, of any kind, of a built-in name or of a YAML file.

    Args:
        name: a key of `BUILDERS`, or a path.
        changes: arguments of the builder, or fields of the file's space.

    Raises:
        ConfigError: neither a built-in name (the nearest is named) nor a readable YAML file.
    """
    if name.endswith((".yaml", ".yml", ".json")) or Path(name).is_file():
        if not Path(name).exists():
            raise ConfigError(
                f"there is no file {name}: give the path of a space, or a name (`nasfast spaces` lists them)"
            )
        return read_space(name).replace(**changes)
    if name not in BUILDERS:
        raise ConfigError(f"unknown space {name!r}: neither a YAML file nor built in; {nearest(name, BUILDERS)}")
    return BUILDERS[name](**changes)


def get_space(
    name: str, *, num_classes: int | None = None, resolution: int | None = None, variant: str | None = None
) -> SearchSpace:
    """The layer-wise space of a built-in name or of a YAML file; None keeps the space's own value.

    Raises:
        ConfigError: neither a built-in name (the nearest is named) nor a readable YAML file, a space of cells, a
            variant of a space that has none, or a resolution at which a layer would have less than one pixel.
    """
    changes = {"num_classes": num_classes, "resolution": resolution, "variant": variant}
    if variant is not None and name != "mobilenet_v2":
        raise ConfigError(f"space.variant={variant!r}: only mobilenet_v2 has variants, not {name}")
    space = named_space(name, **{key: value for key, value in changes.items() if value is not None})
    if isinstance(space, ModuleSpace):
        raise ConfigError(
            f"space {name!r} is that of a Python module, which no command can build: go on in Python (docs/choice.md)"
        )
    if not isinstance(space, SearchSpace):
        layerwise = [key for key, build in BUILDERS.items() if build().LAYERWISE]
        raise ConfigError(
            f"space {name!r} is a space of cells, and this needs a layer-wise one: {', '.join(layerwise)}, or a YAML "
            f"file with `stages`. Cells are searched by `nasfast nasi search --out runs/cells --space {name} --images "
            "FOLDER`, and better in Python (docs/cells.md)"
        )
    least = math.prod(layer.stride for layer in (*space.stem_layers, *space.layers, *space.head_layers))
    if resolution is not None and resolution < least:
        raise ConfigError(
            f"images of {resolution} x {resolution} pixels are too small for space {space.name!r}, whose layers divide "
            f"their side by {least}: give a resolution of at least {least}"
        )
    return space
