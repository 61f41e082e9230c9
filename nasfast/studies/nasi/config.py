"""The settings of the NASI study."""

from nasfast.studies.nasi.study import NasiCompareConfig, NasiQuickConfig, NasiSearchConfig

__all__ = ["NasiCompareConfig", "NasiQuickConfig", "NasiSearchConfig"]
