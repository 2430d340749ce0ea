"""Compiles the large configs for the slices that they are meant for, without owning one.

python -m experiments.launch --config configs/scale.py --config.record=experiments/records
python -m experiments.launch --config configs/scale.py:small

Each compilation is stored as soon as it is done; the same command goes on where it was stopped.
"""

import ml_collections
from ml_collections import config_dict

EXPERIMENT = "experiments.scale"
ONE_SHOT = True
VARIANTS = {
    "small": "the tiny model on 4 TPU chips and on 8 GPUs; a minute on 2 CPU cores",
    "large": "Llama 3 8B and 70B, Mixtral and OLMoE on 64 to 256 chips; 15 minutes on 2 cores",
}

_SMALL = (
    ("tiny", "pretrain:tiny", "v5e:2x2", ""),
    ("tiny", "pretrain:tiny", "h200:8", ""),
)
# One sequence of 4096 tokens a chip, parameters over all 64, everything recomputed: the mesh and
# batch of the published comparison.
_COMPARED = "data.batch_size=64 model.remat=full"
_LARGE = (
    ("8B, one sequence a chip", "pretrain:llama3_8b", "v5p:4x4x4", f"mesh.tensor=1 {_COMPARED}"),
    (
        "Mixtral, one sequence a chip",
        "pretrain:mixtral_8x7b",
        "v5p:4x4x4",
        f"mesh.expert=1 {_COMPARED}",
    ),
    # How temporaries grow: twice the rows, twice the row, four times the devices.
    (
        "8B, one sequence a chip",
        "pretrain:llama3_8b",
        "v5p:4x4x4",
        "mesh.tensor=1 data.batch_size=128 model.remat=full",
    ),
    (
        "8B, one sequence a chip",
        "pretrain:llama3_8b",
        "v5p:4x4x4",
        "mesh.tensor=1 data.batch_size=64 data.row_length=8192 model.remat=full",
    ),
    (
        "8B, one sequence a chip",
        "pretrain:llama3_8b",
        "v5p:8x8x4",
        "mesh.tensor=1 data.batch_size=256 model.remat=full",
    ),
    ("8B", "pretrain:llama3_8b", "v5p:4x4x4", ""),
    ("8B", "pretrain:llama3_8b", "v5p:8x4x4", ""),
    ("8B", "pretrain:llama3_8b", "v5p:8x8x4", ""),
    ("8B", "pretrain:llama3_8b", "v5e:16x16", ""),
    ("8B, all recomputed", "pretrain:llama3_8b", "v5e:16x16", "model.remat=full"),
    ("OLMoE", "pretrain:olmoe_7b", "v5p:4x4x4", ""),
    ("Mixtral", "pretrain:mixtral_8x7b", "v5p:4x4x4", ""),
    ("70B", "pretrain:llama3_70b", "v5p:8x8x4", ""),
    (
        "8B, rows of 32k",
        "pretrain:llama3_8b",
        "v5p:8x8x4",
        "mesh.context=8 data.row_length=32768 data.batch_size=16 model.remat=full",
    ),
    (
        "8B, rows of 128k",
        "pretrain:llama3_8b",
        "v5p:8x8x4",
        "mesh.context=16 data.row_length=131072 data.batch_size=4 model.remat=full",
    ),
)


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    config = ml_collections.ConfigDict()
    # (series, config, topology, overrides); devices of one series are drawn as one line.
    config.programs = _SMALL if variant == "small" else _LARGE
    # A folder to write scale.json and scale.md into as well.
    config.record = config_dict.placeholder(str)
    return config
