"""The moments study: well behaved or pathological at initialisation, in a paper's networks and in ours.

After A. Labatie, *Characterizing Well-Behaved vs. Pathological Deep Neural Networks*, ICML 2019; docs/moments.md.
"""

from nasfast.studies.moments.config import FiguresConfig, ModuleConfig, QuickConfig
from nasfast.studies.moments.measure import load_images
from nasfast.studies.moments.study import figures_study, module_study, quick_study

__all__ = [
    "FiguresConfig",
    "ModuleConfig",
    "QuickConfig",
    "figures_study",
    "load_images",
    "module_study",
    "quick_study",
]
