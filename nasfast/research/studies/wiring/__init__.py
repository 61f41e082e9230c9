"""The wiring study: why topologies of differentiable search grow, prefer width, and collapse on two levels.

Experiments of arXiv 2009.01272 at the scale of a laptop, with pass marks, or at the paper's by configuration
(docs/wiring.md).
"""
