"""Forward and backward of a training step: module by module, or as two CUDA graphs per candidate.

May import `supernet` and all before it. Begin with `eager`; `make_engine` in `graphs` chooses.
"""

from nasfast.engine.eager import EagerEngine, Engine, StepResult
from nasfast.engine.graphs import GraphEngine, make_engine

__all__ = ["EagerEngine", "Engine", "GraphEngine", "StepResult", "make_engine"]
