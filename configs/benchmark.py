"""Measures speed and memory: training, decoding, experts, input pipeline, start-up, loading.

python -m experiments.launch --config configs/benchmark.py
python -m experiments.launch --config configs/benchmark.py:training

Measure on a quiet machine; a run that starts on a busy one says so in its report.
"""

import ml_collections

EXPERIMENT = "experiments.benchmark"
ONE_SHOT = True
VARIANTS = {
    "all": "every suite; about 20 minutes on 2 CPU cores",
    "training": "15 M Llama in float32, against transformers on torch (extra `bench`); 3 minutes",
    "decoding": "greedy decoding of 15 M and 135 M Llamas, against transformers; 10 minutes",
    "engine": "slots refilled as answers end, against batches that wait for the longest; 2 minutes",
    "moe": "experts on the tokens that chose them, against every expert on every token; 1 minute",
    "scoring": "log-likelihoods, against lm-evaluation-harness on torch (extras `eval`, `bench`)",
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

    config.decoding = ml_collections.ConfigDict()
    config.decoding.models = ("llama_15m", "smollm2_135m")
    config.decoding.batch_sizes = (1, 8, 64)
    config.decoding.rounds = 3
    config.decoding.threads = 2
    config.decoding.compare = True

    config.engine = ml_collections.ConfigDict()
    config.engine.num_requests = 96
    config.engine.num_slots = 8
    config.engine.rounds = 3
    config.engine.threads = 2

    config.moe = ml_collections.ConfigDict()
    config.moe.rounds = 5

    config.scoring = ml_collections.ConfigDict()
    config.scoring.questions = 32
    config.scoring.documents = 16
    config.scoring.batch_size = 16
    config.scoring.rounds = 5
    config.scoring.threads = 2
    config.scoring.compare = True

    config.pipeline = ml_collections.ConfigDict()
    config.pipeline.batch_size = 8
    config.pipeline.length = 256
    config.pipeline.seconds = 3.0

    config.startup = ml_collections.ConfigDict()
    config.startup.repeats = 3

    config.loading = ml_collections.ConfigDict()
    config.loading.gigabytes = 2.0
    return config
