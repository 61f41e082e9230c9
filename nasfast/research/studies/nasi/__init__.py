"""The NASI study: how well NASI's score predicts accuracy, and architectures that it chooses at initialisation.

It runs the algorithm of `nasfast.research.nasi` and reports on it; docs/nasi.md.
"""

from nasfast.research.studies.nasi.config import NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.runtime import late

__all__ = [
    "NasiCompareConfig",
    "NasiQuickConfig",
    "NasiSearchConfig",
    "Searches",
    "nasi_compare_study",
    "nasi_quick_study",
    "nasi_search_study",
]

# the settings above need no torch, and help reads only them
__getattr__ = late.names(
    __name__, {"measure": "Searches", "study": "nasi_compare_study nasi_quick_study nasi_search_study"}
)
