"""How often error bars of small evaluations hold the true value, for every interval there is.

python -m experiments.launch --config configs/small_sample_stats.py
python -m experiments.launch --config configs/small_sample_stats.py:paper
"""

import ml_collections
import numpy as np

EXPERIMENT = "experiments.small_sample_stats"
PAPER = "Bowyer et al., ICML 2025, arXiv:2503.01747"
ONE_SHOT = True
VARIANTS = {
    "tiny": "three levels, thousands of simulated evaluations a size; a minute on 2 CPU cores",
    "paper": "the paper's grid: 100 levels, 100 accuracies x 200 repeats, 10,000 draws",
}


def get_config(variant: str = "tiny") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    paper = variant == "paper"
    config = ml_collections.ConfigDict()
    config.seed = 0
    levels = tuple(np.linspace(0.005, 0.2, 100).tolist())
    config.alphas = levels if paper else (0.05, 0.1, 0.2)

    config.independent = ml_collections.ConfigDict()
    config.independent.sizes = (3, 10, 30, 100)
    config.independent.parameters = 100 if paper else 3_000
    config.independent.repeats = 200 if paper else 10
    config.independent.num_samples = 10_000

    config.clustered = ml_collections.ConfigDict()
    config.clustered.sizes = (2, 6, 20, 60)
    config.clustered.cluster_size = 5
    config.clustered.parameters = 100
    config.clustered.repeats = 200 if paper else 20
    config.clustered.num_samples = 10_000 if paper else 2_000
    config.clustered.bootstrap_samples = 10_000 if paper else 1_000
    config.clustered.grid_points = 400 if paper else 150

    config.comparison = ml_collections.ConfigDict()
    config.comparison.sizes = (3, 10, 30, 100)
    config.comparison.parameters = 3_000
    config.comparison.repeats = 1
    config.comparison.num_samples = 2_000
    config.comparison.bca_sizes = (3, 10, 30, 100) if paper else (3, 10)
    config.comparison.bca_samples = 10_000 if paper else 1_000

    config.paired = ml_collections.ConfigDict()
    config.paired.sizes = (3, 10, 30, 100)
    config.paired.parameters = 100 if paper else 600
    config.paired.repeats = 200 if paper else 2
    config.paired.num_samples = 10_000 if paper else 1_500
    config.paired.bootstrap_samples = 10_000 if paper else 1_000

    config.f1 = ml_collections.ConfigDict()
    config.f1.sizes = (3, 10, 30, 100)
    config.f1.parameters = 10_000 if paper else 2_000
    config.f1.repeats = 1
    config.f1.num_samples = 2_000
    config.f1.bca_sizes = (3, 10, 30, 100) if paper else (3, 10)
    config.f1.bca_samples = 10_000 if paper else 500
    return config
