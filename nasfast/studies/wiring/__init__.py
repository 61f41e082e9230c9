"""The wiring study: why topologies of differentiable search grow, prefer width, and collapse on two levels.

Experiments of arXiv 2009.01272 at the scale of a laptop, with pass marks, or at the paper's by configuration
(docs/wiring.md).
"""

from nasfast.studies.wiring.config import (
    CollapseConfig,
    CostConfig,
    GrowthConfig,
    TheoremsConfig,
    WidthConfig,
)
from nasfast.studies.wiring.measure import measures
from nasfast.studies.wiring.study import collapse_study, cost_study, growth_study, theorems_study, width_study

__all__ = [
    "CollapseConfig",
    "CostConfig",
    "GrowthConfig",
    "TheoremsConfig",
    "WidthConfig",
    "collapse_study",
    "cost_study",
    "growth_study",
    "measures",
    "theorems_study",
    "width_study",
]
