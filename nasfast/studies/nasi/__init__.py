"""The NASI study: how well NASI's score predicts accuracy, and architectures that it chooses at initialisation.

It runs the algorithm of `nasfast.nasi` and reports on it; docs/nasi.md.
"""

from nasfast.studies.nasi.config import NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.studies.nasi.measure import Searches
from nasfast.studies.nasi.study import nasi_compare_study, nasi_quick_study, nasi_search_study

__all__ = [
    "NasiCompareConfig",
    "NasiQuickConfig",
    "NasiSearchConfig",
    "Searches",
    "nasi_compare_study",
    "nasi_quick_study",
    "nasi_search_study",
]
