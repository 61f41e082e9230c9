"""Runs forward and backward of a training step: module by module, or as one pair of CUDA graphs per candidate."""

from nasfast.engine.eager import EagerEngine, Engine, StepResult
from nasfast.engine.graphs import GraphEngine, make_engine

__all__ = ["EagerEngine", "Engine", "GraphEngine", "StepResult", "make_engine"]
