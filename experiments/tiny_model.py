"""The small trained language model that other experiments work on."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import ml_collections

from experiments import config_files, pretrain, report, text_data
from jaxllm.data.tokenizers import Tokenizer, load_tokenizer
from jaxllm.models import hf
from jaxllm.models.config import ModelConfig


def get_tiny_model(
    config: ml_collections.ConfigDict | None = None,
) -> tuple[ModelConfig, dict[str, Any], Tokenizer]:
    """The model of configs/pretrain.py:tiny, trained on the first call (about three minutes).

    It is kept under runs/cache in a folder that is named after its recipe (config, texts, code
    version), so another recipe trains another model. A run of `pretrain:tiny` in its default
    workdir is used too if its recipe is the same.

    Args:
      config: another config of experiments/pretrain.py.

    Returns:
      (model config, parameters, tokenizer).
    """
    config = config or config_files.resolve("pretrain:tiny").config
    recipe = pretrain.recipe_hash(config)
    folder = text_data.CACHE / "models" / f"tiny-{recipe[:16]}"
    for candidate in (folder, pathlib.Path("runs") / "pretrain-tiny"):
        if _recipe_of(candidate) == recipe:
            return _load(candidate, config)
    print(f"training the tiny model in {folder} (once for this recipe)", flush=True)
    report.write_json(folder / "config.json", {"config": config_files.to_json(config)})
    pretrain.train(config, folder)
    return _load(folder, config)


def _recipe_of(folder: pathlib.Path) -> str | None:
    """The recipe of a finished run; it is written last, after the model."""
    path = folder / "recipe.json"
    if not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))["recipe"]


def _load(
    folder: pathlib.Path, config: ml_collections.ConfigDict
) -> tuple[ModelConfig, dict[str, Any], Tokenizer]:
    model, params = hf.load_hf(folder / "model")
    return model, params, load_tokenizer(config.tokenizer.path or folder / "model")
