"""Retraining: the chosen architecture as a plain trained network, and its files.

`retrain` trains it, `save_model`, `load_model`, `export_program` and `export_onnx` are its files, `classify` asks it
about an image; a plug-in gives it to timm.
"""

from nasfast.retrain.export import export_onnx, export_program, load_model, save_model
from nasfast.retrain.inference import classify
from nasfast.retrain.retrain import RetrainResult, retrain
from nasfast.settings import ImageInfo, RetrainConfig

__all__ = [
    "ImageInfo",
    "RetrainConfig",
    "RetrainResult",
    "classify",
    "export_onnx",
    "export_program",
    "load_model",
    "retrain",
    "save_model",
]
