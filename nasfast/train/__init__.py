"""Training: one loop for supernets and plain networks, its checkpoints, and evaluation.

May import `engine`, `data` and all before them. Begin with `loop`; `train_supernet` adds the presets of the methods.
"""

from nasfast.settings import TrainConfig
from nasfast.train.checkpoint import CheckpointError
from nasfast.train.config import TrainExtras, TrainStage
from nasfast.train.evaluate import Evaluation, evaluate, recalibrate_bn
from nasfast.train.loop import TrainingDivergedError, train
from nasfast.train.supernet import train_supernet

__all__ = [
    "CheckpointError",
    "Evaluation",
    "TrainConfig",
    "TrainExtras",
    "TrainStage",
    "TrainingDivergedError",
    "evaluate",
    "recalibrate_bn",
    "train",
    "train_supernet",
]
