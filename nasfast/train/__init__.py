"""Training: one loop for supernets and standalone networks, its checkpoints, and evaluation.

`train` is the loop; `train_supernet` trains a supernet along sampled paths with the presets of the methods.
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
