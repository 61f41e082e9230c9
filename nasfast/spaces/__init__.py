"""Search spaces of layers and of cells, architectures, exact costs and path samplers.

May import `config` and `runtime`, and no torch. Begin with `arch_space`, which says what every space offers; `registry`
reads them by name or from a file.
"""

from nasfast.spaces.arch import SKIP, Arch, ArchError, arch_file_text, format_arch, parse_arch
from nasfast.spaces.arch_space import ArchSpace, LayerSpace, arch_from_json, arch_to_json, load_arch
from nasfast.spaces.blocks import Block, SqueezeExcite, block_cost
from nasfast.spaces.cost import Cost, Operator
from nasfast.spaces.cost_table import CostTable, read_cost_table
from nasfast.spaces.module_space import Branch, ModuleChoice, ModuleSpace
from nasfast.spaces.registry import (
    BUILDERS,
    digits_macro,
    digits_mini,
    get_space,
    list_spaces,
    mobilenet_v2,
    mobilenet_v3,
    named_space,
    nas_bench_macro,
    read_space,
    shufflenet_v2,
    space_kind,
)
from nasfast.spaces.samplers import SAMPLERS, FairSampler, Sampler, StrictFairSampler, UniformSampler, mean_path
from nasfast.spaces.space import FixedLayer, Layer, SearchSpace, Stage

__all__ = [
    "BUILDERS",
    "SAMPLERS",
    "SKIP",
    "Arch",
    "ArchError",
    "ArchSpace",
    "Block",
    "Branch",
    "Cost",
    "CostTable",
    "FairSampler",
    "FixedLayer",
    "Layer",
    "LayerSpace",
    "ModuleChoice",
    "ModuleSpace",
    "Operator",
    "Sampler",
    "SearchSpace",
    "SqueezeExcite",
    "Stage",
    "StrictFairSampler",
    "UniformSampler",
    "arch_file_text",
    "arch_from_json",
    "arch_to_json",
    "block_cost",
    "digits_macro",
    "digits_mini",
    "format_arch",
    "get_space",
    "list_spaces",
    "load_arch",
    "mean_path",
    "mobilenet_v2",
    "mobilenet_v3",
    "named_space",
    "nas_bench_macro",
    "parse_arch",
    "read_cost_table",
    "read_space",
    "shufflenet_v2",
    "space_kind",
]
