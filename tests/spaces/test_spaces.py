"""Golden costs, architectures, and the written form of spaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nasfast.config import ConfigError
from nasfast.spaces import (
    BUILDERS,
    SKIP,
    ArchError,
    Block,
    Cost,
    FixedLayer,
    SearchSpace,
    SqueezeExcite,
    Stage,
    arch_file_text,
    arch_from_json,
    arch_to_json,
    format_arch,
    get_space,
    load_arch,
    mobilenet_v2,
    nas_bench_macro,
    parse_arch,
    read_space,
    shufflenet_v2,
)

LAYERWISE = {name: build for name, build in BUILDERS.items() if isinstance(build(), SearchSpace)}
SPACES = {name: build() for name, build in LAYERWISE.items()} | {"bnnas": mobilenet_v2(variant="bnnas")}

# Published rows of NAS-Bench-Macro: architecture, parameters, MACs (its "flops").
MACRO_ROWS = [("00000011", 1195306, 20517376), ("00000100", 507562, 11962880), ("00001022", 2154410, 40620544)]


ACTS = "'identity', 'relu', 'relu6', 'tanh', 'hswish', 'silu'"


@pytest.fixture(params=sorted(SPACES))
def space(request) -> SearchSpace:
    return SPACES[request.param]


def test_released_bnnas_architecture():
    """Convolutions and classifier; BN-NAS's own table prints 473,549,240, counting the classifier as 2 in out - out."""
    arch = parse_arch("3 -1 0 4 0 -1 -1 0 4 -1 4 4 1 4 2 0 0 4 0 2 2")
    cost = mobilenet_v2(variant="bnnas").cost(arch)
    assert cost == Cost(macs=471_822_240, params=5_228_536)
    assert cost.macs + 1728 * 1000 - 1000 == 473_549_240


@pytest.mark.parametrize(("arch", "params", "macs"), MACRO_ROWS, ids=[row[0] for row in MACRO_ROWS])
def test_nas_bench_macro_rows(arch, params, macs):
    assert nas_bench_macro().cost(parse_arch(arch)) == Cost(macs=macs, params=params)


def test_layers_may_have_an_activation_of_their_own():
    space = mobilenet_v2()
    first = space.stages[0].replace(activation="hswish")
    changed = space.replace(stages=(first, *space.stages[1:]), head=(space.head[0].replace(activation="silu"),))
    assert [layer.activation for layer in changed.layers] == ["hswish"] * 4 + [None] * 16
    assert changed.head_layers[0].activation == "silu"
    assert changed.own_activations == {"hswish", "silu"} and not space.own_activations
    assert changed.fingerprint != space.fingerprint
    assert SearchSpace.from_dict(changed.to_dict()) == changed


def test_the_built_in_spaces_are_what_saved_files_belong_to():
    """Activations, sizes and blocks; a field that is null does not count, so older files still belong."""
    assert {name: space.fingerprint for name, space in SPACES.items()} == {
        "bnnas": "530f563ded97a7f4",
        "digits_macro": "75c0351dbcd543fa",
        "digits_mini": "9cb790647a71aa05",
        "mobilenet_v2": "39003f69a4bd1c3c",
        "mobilenet_v2_x0_5": "dbe6d041764bf158",
        "mobilenet_v3": "a53a943a61ea3ff5",
        "nas_bench_macro": "8b85f68e8c87bfce",
        "shufflenet_v2": "83b0f063f8451069",
    }
    assert (SPACES["bnnas"].cardinality, SPACES["mobilenet_v3"].cardinality) == (6**17, 8**10 * 12**4)


def test_reduction_layers_have_no_indicator():
    reductions = [i for i, layer in enumerate(mobilenet_v2().layers) if layer.indicator_choice is None]
    # the first layer of every stage, the stride-1 stage of 128 channels included
    assert reductions == [0, 4, 8, 12, 16]
    assert [layer.indicator_choice for layer in nas_bench_macro().layers] == [None, 0, None, 0, 0, None, 0, 0]


def test_fingerprint_ignores_only_the_name(space):
    assert space.replace(name="other").fingerprint == space.fingerprint
    assert space.replace(num_classes=7).fingerprint != space.fingerprint
    assert len({s.fingerprint for s in SPACES.values()}) == len(SPACES)


CUSTOM = """
name: mine
resolution: 64
num_classes: 7
stem:
  - {block: {kind: conv, kernel: 3}, out: 8, stride: 2}
stages:
  - out: 12
    layers: 2
    stride: 2
    choices:
      - {kind: mbconv, kernel: 3, expand: 2}
      - {kind: mbconv, kernel: 5}
    pinned: [1]
head: []
"""


def test_custom_space_read_space(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CUSTOM)
    space = get_space(str(path), num_classes=3)
    assert (space.name, len(space), space.cardinality, space.num_classes) == ("mine", 2, 2, 3)
    # stem 3 -> 8 at 32^2; 8 -> 16 at 32^2, depthwise and 16 -> 12 at 16^2; linear 12 -> 3
    macs = 27 * 8 * 32**2 + 8 * 16 * 32**2 + 9 * 16 * 16**2 + 16 * 12 * 16**2 + 12 * 3
    params = (27 * 8 + 16) + (8 * 16 + 32) + (9 * 16 + 32) + (16 * 12 + 24) + (12 * 3 + 3)
    assert space.cost((0, SKIP)) == Cost(macs, params)
    assert space.describe((1, SKIP)) == ["k5 e1", "skip"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("expand: 2", "expands: 2", r"'stages\[0\].choices\[0\].expands'; did you mean 'expand'"),
        ("kind: mbconv, kernel: 5", "kind: mbcomv, kernel: 5", "did you mean 'mbconv'"),
        ("kernel: 5", "kernel: 4", "kernel must be odd"),
        ("pinned: [1]", "pinned: [1, 2]", r"stage 0: pinned must be indices from 0 to 1, got \[2\]"),
        ("out: 8, stride: 2", "out: 0", "stem layer 0: out and stride must be positive, got 0, 1"),
        ("head: []", "head: [{block: {kind: conv}, out: -4}]", "head layer 0: out and stride must be positive"),
        ("pinned: [1]", "pinned: [0]", "layer 0 changes shape and cannot be pinned"),
        ("layers: 2", "layers: 0", "out, layers and stride must be positive"),
        ("kernel: 5}", "kernel: 3, expand: 2}", "lists the same choice twice"),
        ("expand: 2", "se: {ratio: 0}", "se: ratio must be positive and finite, got 0"),
        ("expand: 2", "expand: .nan", "block mbconv: expand must be at least 1 and finite, got nan"),
        ("expand: 2", "se: {gate: tanh}", r"choices\[0\].se.gate': got 'tanh', allowed: 'hsigmoid', 'sigmoid'"),
        ("kind: conv, kernel: 3", "kind: conv, se: {}", "block conv: only mbconv has squeeze-and-excitation"),
        ("kind: conv", "kind: hidden", "stem layer 0: a hidden block .* only the last layer of the head can be one"),
        ("head: []", "head: [&h {block: {kind: hidden}, out: 4}, *h]", "head layer 0: a hidden block takes the mean"),
        ("kind: mbconv, kernel: 5", "kind: hidden, kernel: 5", "'mine', layer 0: a hidden block takes the mean"),
        ("name: mine", "name: mine\nactivation: gelu", f"'activation': got 'gelu', allowed: {ACTS}"),
    ],
)
def test_errors_of_a_custom_space_name_the_key(tmp_path, old, new, message):
    path = tmp_path / "mine.yaml"
    assert old in CUSTOM
    path.write_text(CUSTOM.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_space(path)


def test_a_variant_belongs_to_one_space():
    with pytest.raises(ConfigError, match="only mobilenet_v2 has variants"):
        get_space("shufflenet_v2", variant="bnnas")


def test_labels_tell_candidates_apart():
    excited = [None, SqueezeExcite(), SqueezeExcite(0.5), SqueezeExcite(gate="sigmoid"), SqueezeExcite(0.1, "silu")]
    labels = [Block("mbconv", 5, 2.5, se).label for se in excited]
    assert labels == ["k5 e2.5", "k5 e2.5 se0.25", "k5 e2.5 se0.5", "k5 e2.5 se0.25 sigmoid", "k5 e2.5 se0.1 silu"]
    others = [Block("shuffle_xception", 3), Block("shuffle_xception", 7), Block("identity"), Block("identity", 5, 2)]
    assert [block.label for block in others] == ["xception", "xception k7", "identity", "identity k5 e2"]


def test_squeezed_channels_are_those_of_torchvision():
    """The hidden channels of MobileNetV3's blocks with SE, a few odd ones, and a rounding that would lose 10 %."""
    squeezed = {72: 24, 120: 32, 480: 120, 672: 168, 960: 240, 16: 8, 4: 8, 44: 16}
    assert {hidden: SqueezeExcite().channels(hidden) for hidden in squeezed} == squeezed


@pytest.mark.parametrize(
    ("part", "layers", "message"),
    [
        ("stages", Stage(7, 1, 2, (Block("shuffle"),)), "layer 0: ShuffleNetV2 units need an even number of channels"),
        ("stages", Stage(16, 1, 2, (Block("shuffle"),)), "layer 0: a stride-2 .* out must be more than 16, got 16"),
        ("head", FixedLayer(Block("shuffle"), 20), "head layer 0: a stride-1 ShuffleNetV2 unit cannot change channels"),
        ("stem", FixedLayer(Block("shuffle"), 21, stride=2), "stem layer 0: ShuffleNetV2 units need an even number"),
    ],
)
def test_shapes_that_a_shuffle_unit_cannot_have(part, layers, message):
    with pytest.raises(ValueError, match=f"'shufflenet_v2', {message}"):
        shufflenet_v2().replace(**{part: (layers,)})


def test_a_stage_without_choices_is_refused():
    with pytest.raises(ValueError, match="stage 0 has no choices"):
        SearchSpace("x", 8, 2, (FixedLayer(Block("conv"), 4),), (Stage(4, 1, 1, ()),), ())


@given(st.lists(st.integers(-1, 12), min_size=2, max_size=30).map(tuple))
def test_arch_text_round_trip(arch):
    assert parse_arch(format_arch(arch)) == arch
    assert parse_arch(format_arch(arch).replace(" ", ",")) == arch
    assert parse_arch(arch_file_text(arch)) == arch


def test_arch_forms():
    assert parse_arch("01220122") == (0, 1, 2, 2, 0, 1, 2, 2)
    assert parse_arch("(1, 2)") == parse_arch("[1 2]") == parse_arch([1, "2"]) == (1, 2)
    with pytest.raises(ArchError, match="must be integers"):
        parse_arch([0.9, 1])
    with pytest.raises(ArchError, match="must be integers"):
        parse_arch("1 two 3")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ((0,) * 7, "must have 8 values, got 7"),
        ((0, 1, 2, 3, 0, 0, 0, 0), "layer 3 of space 'nas_bench_macro': choice 3 is not one of 0 .identity., 1"),
        ((0, 1, 2.0, 0, 0, 0, 0, 0), "layer 2 .*: choice 2.0 is not one of 0 .identity., 1"),
        ((0, 1, 2, "1", 0, 0, 0, 0), "layer 3 .*: choice '1' is not"),
    ],
)
def test_arch_errors_name_the_layer(arch, message):
    with pytest.raises(ArchError, match=message):
        nas_bench_macro().check(arch)
    with pytest.raises(ArchError, match=message):
        nas_bench_macro().cost(arch)


def test_integers_of_numpy_become_plain_ones():
    arch = nas_bench_macro().check(np.array([0, 1, 2, 2, 1, 0, 1, 2]))
    assert arch == (0, 1, 2, 2, 1, 0, 1, 2)
    assert {type(choice) for choice in arch} == {int}


def test_paths_may_take_the_layer_indicator_only_where_there_is_one():
    space = mobilenet_v2()
    space.check((0, SKIP, *(0,) * 18))
    with pytest.raises(ArchError, match="layer 4"):
        space.check((0, 0, 0, 0, SKIP, *(0,) * 15))
    with pytest.raises(ArchError, match="must have 20 values"):
        space.check((0,) * 21)


def test_arch_json_round_trip(tmp_path):
    space, arch = nas_bench_macro(), (0, 1, 2, 2, 1, 0, 1, 2)
    path = tmp_path / "arch.json"
    path.write_text(arch_to_json(arch, space))
    assert load_arch(path, space) == arch
    with pytest.raises(ArchError, match="written for space 'nas_bench_macro'"):
        load_arch(path, nas_bench_macro(num_classes=100))
    with pytest.raises(ArchError, match="not an architecture in JSON"):
        arch_from_json("[0, 1]", space)
