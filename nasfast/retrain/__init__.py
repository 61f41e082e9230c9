"""The chosen architecture as a trained network and as files."""

from nasfast.retrain.export import export_onnx, load_model, save_model
from nasfast.retrain.retrain import RetrainConfig, RetrainResult, retrain

__all__ = ["RetrainConfig", "RetrainResult", "export_onnx", "load_model", "retrain", "save_model"]
