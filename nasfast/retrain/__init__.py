"""Retraining: the chosen architecture as a plain trained network, and its files.

May import `search` and all before it. Begin with `retrain`; `export` writes the files, `classify` asks a network
about an image, and a plug-in gives it to timm.
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
