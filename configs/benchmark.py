"""Measures speed and memory: training, experts, input pipeline, start-up, loading of checkpoints.

python -m experiments.launch --config configs/benchmark.py
python -m experiments.launch --config configs/benchmark.py:training

Measure on a quiet machine; a run that starts on a busy one says so in its report.
"""

import ml_collections

EXPERIMENT = "experiments.benchmark"
ONE_SHOT = True
VARIANTS = {
    "all": "every suite; about 8 minutes on 2 CPU cores",
    "training": "15 M Llama in float32, against transformers on torch (extra `bench`); 3 minutes",
    "moe": "experts on the tokens that chose them, against every expert on every token; 1 minute",
    "pipeline": "tokens a second of the input pipeline, against what the 15 M model consumes",
    "startup": "import times, and compile time of the tiny model's training step",
    "loading": "peak host memory while a synthetic 2 GB sharded checkpoint is loaded",
}


def get_config(variant: str = "all") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    suites = tuple(name for name in VARIANTS if name != "all") if variant == "all" else (variant,)
    config = ml_collections.ConfigDict()
    config.suites = suites

    config.training = ml_collections.ConfigDict()
    config.training.batch_size = 8
    config.training.length = 256
    config.training.rounds = 5
    config.training.steps = 2
    config.training.threads = 2
    config.training.compare = True

    config.moe = ml_collections.ConfigDict()
    config.moe.rounds = 5

    config.pipeline = ml_collections.ConfigDict()
    config.pipeline.batch_size = 8
    config.pipeline.length = 256
    config.pipeline.seconds = 3.0

    config.startup = ml_collections.ConfigDict()
    config.startup.repeats = 3

    config.loading = ml_collections.ConfigDict()
    config.loading.gigabytes = 2.0
    return config
