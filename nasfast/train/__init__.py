"""One training loop for supernets and standalone networks, checkpoints, evaluation."""

from nasfast.train.checkpoint import CheckpointError
from nasfast.train.evaluate import Evaluation, evaluate, recalibrate_bn
from nasfast.train.loop import TrainConfig, TrainingDivergedError, train
from nasfast.train.supernet import train_supernet

__all__ = [
    "CheckpointError",
    "Evaluation",
    "TrainConfig",
    "TrainingDivergedError",
    "evaluate",
    "recalibrate_bn",
    "train",
    "train_supernet",
]
