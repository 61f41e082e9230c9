"""Measurements of what initialisation does to signals and gradients in any module.

`jacobian` measures isometry, `moments` signals by depth; `meanfield`, `concentration` and `fairness` test the theory.
"""

from nasfast.analysis.concentration import Concentration, Setting, Theorem1, deviations, exponents, theorem1
from nasfast.analysis.fairness import (
    CandidateOutput,
    DepthSpread,
    Fairness,
    SeedStability,
    depth_spread,
    fairness,
    seed_stability,
    without_indicator_bn,
)
from nasfast.analysis.jacobian import Isometry, circular_conv_moments, isometry
from nasfast.analysis.meanfield import (
    Activation,
    FixedPoint,
    PhaseDiagram,
    SpectrumMoments,
    chi,
    correlation_map,
    critical_point,
    fixed_point,
    gain,
    linear_units_moments,
    phase_diagram,
    slope_moment,
    spectrum_moments,
    variance_map,
)

__all__ = [
    "Activation",
    "CandidateOutput",
    "Concentration",
    "DepthSpread",
    "Fairness",
    "FixedPoint",
    "Isometry",
    "PhaseDiagram",
    "SeedStability",
    "Setting",
    "SpectrumMoments",
    "Theorem1",
    "chi",
    "circular_conv_moments",
    "correlation_map",
    "critical_point",
    "depth_spread",
    "deviations",
    "exponents",
    "fairness",
    "fixed_point",
    "gain",
    "isometry",
    "linear_units_moments",
    "phase_diagram",
    "seed_stability",
    "slope_moment",
    "spectrum_moments",
    "theorem1",
    "variance_map",
    "without_indicator_bn",
]
