"""Measurements of what initialisation does to signals and gradients in any module.

`jacobian` measures isometry, `moments` signals by depth; `meanfield` and `fairness` test the theory.
"""
