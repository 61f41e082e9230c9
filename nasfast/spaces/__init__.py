"""Search spaces, architectures, closed-form costs and path samplers. Imports neither torch nor the operators."""

from nasfast.spaces.arch import (
    SKIP,
    Arch,
    ArchError,
    ArchSpace,
    arch_from_json,
    arch_to_json,
    format_arch,
    load_arch,
    parse_arch,
)
from nasfast.spaces.builders import (
    BUILDERS,
    digits_mini,
    get_space,
    mobilenet_v2,
    names_file,
    nas_bench_macro,
    shufflenet_v2,
)
from nasfast.spaces.cost import Cost, Operator, block_cost
from nasfast.spaces.samplers import SAMPLERS, FairSampler, Sampler, StrictFairSampler, UniformSampler, mean_path
from nasfast.spaces.space import Block, FixedLayer, Layer, SearchSpace, Stage, from_yaml

__all__ = [
    "BUILDERS",
    "SAMPLERS",
    "SKIP",
    "Arch",
    "ArchError",
    "ArchSpace",
    "Block",
    "Cost",
    "FairSampler",
    "FixedLayer",
    "Layer",
    "Operator",
    "Sampler",
    "SearchSpace",
    "Stage",
    "StrictFairSampler",
    "UniformSampler",
    "arch_from_json",
    "arch_to_json",
    "block_cost",
    "digits_mini",
    "format_arch",
    "from_yaml",
    "get_space",
    "load_arch",
    "mean_path",
    "mobilenet_v2",
    "names_file",
    "nas_bench_macro",
    "parse_arch",
    "shufflenet_v2",
]
