"""A smaller network from a pretrained one: what can be narrowed and dropped, what that costs, and the cut network.

May import `search`, `train` and all before them. `find` captures a network (`graph`), joins its channels (`channels`)
and makes its choices a space. `measure` gives each candidate a score and weights, by `eliminate`. `search_table` finds
the best sums under limits; `search_measured` measures the best of them, over several sizes of images, beside `uniform`
widths. `cut` makes the network, by a `Recipe`, which `save` writes and `load` applies to a fresh network. `adapt`
trains the little it needs, by the logits and the `features` of the larger network.
"""

from nasfast.shrink.adapt import adapt, affine_parameters
from nasfast.shrink.cut import cut, make_recipe
from nasfast.shrink.features import gives_features, kept_features, last_linear, with_features
from nasfast.shrink.find import Block, Found, Place, find
from nasfast.shrink.graph import ShrinkError
from nasfast.shrink.measure import Measured, Solution, divergence, label_logits, least_images, measure
from nasfast.shrink.recipe import Recipe, load, rebuild, save
from nasfast.shrink.rounds import Searched, Shrunk, narrowed, search_measured
from nasfast.shrink.uniform import uniform_widths

__all__ = [
    "Block",
    "Found",
    "Measured",
    "Place",
    "Recipe",
    "Searched",
    "ShrinkError",
    "Shrunk",
    "Solution",
    "adapt",
    "affine_parameters",
    "cut",
    "divergence",
    "find",
    "gives_features",
    "kept_features",
    "label_logits",
    "last_linear",
    "least_images",
    "load",
    "make_recipe",
    "measure",
    "narrowed",
    "rebuild",
    "save",
    "search_measured",
    "uniform_widths",
    "with_features",
]
