"""Compiles every kernel for chips that need not be there, and compares it with the chip's limits.

python -m experiments.launch --config configs/kernel_report.py --config.record=experiments/records
python -m experiments.launch --config configs/kernel_report.py:rank --config.only=quantized_kv
python -m experiments.launch --config configs/kernel_report.py:measure

Each compilation is stored as soon as it is done; the same command goes on where it was stopped.
"""

import ml_collections
from ml_collections import config_dict

EXPERIMENT = "experiments.kernel_report"
ONE_SHOT = True
VARIANTS = {
    "chips": "all cases for v5e, v5p, v6e and an H200; about 10 seconds each on 2 CPU cores",
    "rank": "the same with other sizes of blocks, for TPUs",
    "measure": "times on the GPU of this machine, beside XLA's version of the reference",
}


def get_config(variant: str = "chips") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    config = ml_collections.ConfigDict()
    tpus = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1")
    config.topologies = {"chips": (*tpus, "h200"), "rank": tpus, "measure": ()}[variant]
    # Only cases whose name contains this.
    config.only = ""
    config.rank = variant == "rank"
    config.measure = variant == "measure"
    # A folder to write kernels.json and kernels.md into as well.
    config.record = config_dict.placeholder(str)
    return config
