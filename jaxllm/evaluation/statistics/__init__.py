"""Error bars for evaluations of tens to hundreds of questions.

    report_mean(correct)                      # accuracy with its interval
    report_mean(correct, clusters=document)   # several questions a document
    compare(correct_a, correct_b)             # the same questions, A - B and P(A > B)

Below stand all intervals of Bowyer, Aitchison and Ivanova, "Don't use the CLT in LLM evals with
fewer than a few hundred datapoints" (ICML 2025, arXiv:2503.01747). Functions take arrays with
the question axis last and any leading axes, a level alpha or a vector of A of them, and return
NumPy float64 arrays [..., A, 2]. They run on the host, not inside `jit`.
"""

from jaxllm.evaluation.statistics.clustered import (
    Weighted,
    bootstrap_cluster,
    bootstrap_within,
    cluster_sums,
    clustered_clt,
    clustered_grid,
    clustered_importance,
)
from jaxllm.evaluation.statistics.confusion import (
    f1,
    f_beta,
    kappa,
    matthews,
    metric_bootstrap,
    metric_posterior,
    precision,
    recall,
)
from jaxllm.evaluation.statistics.independent import (
    OddsRatio,
    bootstrap_bca,
    difference_clt,
    difference_newcombe,
    difference_posterior,
    odds_ratio_fisher,
    odds_ratio_posterior,
    p_value_greater,
    probability_greater,
)
from jaxllm.evaluation.statistics.paired import (
    cell_probabilities,
    mcnemar,
    paired_bootstrap,
    paired_clt,
    paired_counts,
    paired_dirichlet,
    paired_posterior,
)
from jaxllm.evaluation.statistics.proportions import (
    JEFFREYS,
    UNIFORM,
    beta_posterior,
    bootstrap,
    clopper_pearson,
    clt,
    wilson,
)
from jaxllm.evaluation.statistics.summary import Estimate, compare, report_mean
from jaxllm.evaluation.statistics.table import EvalTable, load_table

__all__ = [
    "JEFFREYS",
    "UNIFORM",
    "EvalTable",
    "Estimate",
    "OddsRatio",
    "Weighted",
    "beta_posterior",
    "bootstrap",
    "bootstrap_bca",
    "bootstrap_cluster",
    "bootstrap_within",
    "cell_probabilities",
    "clopper_pearson",
    "clt",
    "cluster_sums",
    "clustered_clt",
    "clustered_grid",
    "clustered_importance",
    "compare",
    "difference_clt",
    "difference_newcombe",
    "difference_posterior",
    "f1",
    "f_beta",
    "kappa",
    "load_table",
    "matthews",
    "mcnemar",
    "metric_bootstrap",
    "metric_posterior",
    "odds_ratio_fisher",
    "odds_ratio_posterior",
    "p_value_greater",
    "paired_bootstrap",
    "paired_clt",
    "paired_counts",
    "paired_dirichlet",
    "paired_posterior",
    "precision",
    "probability_greater",
    "recall",
    "report_mean",
    "wilson",
]
