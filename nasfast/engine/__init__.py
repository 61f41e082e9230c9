"""How forward and backward of a step are executed: module by module, or as CUDA graphs of every (layer, candidate)."""

from nasfast.engine.eager import EagerEngine, Engine, StepResult
from nasfast.engine.graphs import GraphEngine, MemoryPlan, make_engine

__all__ = ["EagerEngine", "Engine", "GraphEngine", "MemoryPlan", "StepResult", "make_engine"]
