"""The wiring study: why topologies of differentiable search grow, prefer width, and collapse on two levels.

Experiments of arXiv 2009.01272 at the scale of a laptop, with pass marks, or at the paper's by configuration
(docs/wiring.md).
"""

from nasfast.research.studies.wiring.config import (
    CollapseConfig,
    CostConfig,
    GrowthConfig,
    TheoremsConfig,
    WidthConfig,
)
from nasfast.runtime import late

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

# the settings above need no torch, and help reads only them
__getattr__ = late.names(
    __name__, {"measure": "measures", "study": "collapse_study cost_study growth_study theorems_study width_study"}
)
