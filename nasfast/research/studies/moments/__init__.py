"""The moments study: well behaved or pathological at initialisation, in a paper's networks and in ours.

After A. Labatie, *Characterizing Well-Behaved vs. Pathological Deep Neural Networks*, ICML 2019; docs/moments.md.
"""

from nasfast.research.studies.moments.config import FiguresConfig, ModuleConfig, QuickConfig
from nasfast.runtime import late

__all__ = [
    "FiguresConfig",
    "ModuleConfig",
    "QuickConfig",
    "figures_study",
    "load_images",
    "module_study",
    "quick_study",
]

# the settings above need no torch, and help reads only them
__getattr__ = late.names(__name__, {"measure": "load_images", "study": "figures_study module_study quick_study"})
