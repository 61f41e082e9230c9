"""Moments of signal and noise in deep networks, which tell at initialisation whether a network is well behaved.

The theory is that of A. Labatie, *Characterizing Well-Behaved vs. Pathological Deep Neural Networks*, ICML 2019; see
docs/moments.md.
"""

from nasfast.analysis.moments.detect import (
    Line,
    PowerLaw,
    Verdict,
    detect,
    dilution_bounds,
    fit_line,
    fit_power_law,
    power_law_of,
    summarise,
)
from nasfast.analysis.moments.inputs import Source, fields, gaussian, images, standardised
from nasfast.analysis.moments.module import ModuleMoments, held, module_chi, module_moments, push
from nasfast.analysis.moments.networks import Draws, NetConfig, Run, propagate, run, run_chunk
from nasfast.analysis.moments.pairs import (
    Act,
    Norm,
    Padding,
    Pair,
    act,
    add,
    batch_norm,
    conv,
    group_norm,
    normalise,
    rescale,
)
from nasfast.analysis.moments.statistics import effective_rank, energies, ranks, shape

__all__ = [
    "Act",
    "Draws",
    "Line",
    "ModuleMoments",
    "NetConfig",
    "Norm",
    "Padding",
    "Pair",
    "PowerLaw",
    "Run",
    "Source",
    "Verdict",
    "act",
    "add",
    "batch_norm",
    "conv",
    "detect",
    "dilution_bounds",
    "effective_rank",
    "energies",
    "fields",
    "fit_line",
    "fit_power_law",
    "gaussian",
    "group_norm",
    "held",
    "images",
    "module_chi",
    "module_moments",
    "normalise",
    "power_law_of",
    "propagate",
    "push",
    "ranks",
    "rescale",
    "run",
    "run_chunk",
    "shape",
    "standardised",
    "summarise",
]
