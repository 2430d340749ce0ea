"""Checkpoints of Hugging Face layout and GGUF files: in, out, and the table of named models."""

from jaxllm.models.hf.config import config_from_hf
from jaxllm.models.hf.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.hf.export import config_to_hf
from jaxllm.models.hf.load import load_hf
from jaxllm.models.hf.named import MODELS, resolve_model
from jaxllm.models.hf.save import save_hf

__all__ = [
    "MODELS",
    "CheckpointError",
    "UnsupportedModelError",
    "config_from_hf",
    "config_to_hf",
    "load_hf",
    "resolve_model",
    "save_hf",
]
