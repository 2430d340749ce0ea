"""What must hold of any intervals: symmetries, limits, refusals."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special as scipy_special
from scipy import stats

from jaxllm.evaluation import statistics
from jaxllm.evaluation.statistics import clustered, independent, special

ALPHAS = np.array([0.01, 0.05, 0.2])
KEY = jax.random.key(7)


@st.composite
def successes(draw, largest=300):
    n = draw(st.integers(1, largest))
    return draw(st.integers(0, n)), n


@hypothesis.given(successes())
def test_clopper_pearson_contains_the_posterior(counts):
    outer = statistics.clopper_pearson(*counts, ALPHAS)
    inner = statistics.beta_posterior(*counts, ALPHAS)
    assert np.all(outer[:, 0] <= inner[:, 0] + 1e-12)
    assert np.all(outer[:, 1] >= inner[:, 1] - 1e-12)


@hypothesis.given(successes())
@pytest.mark.parametrize(
    "method", [statistics.wilson, statistics.clopper_pearson, statistics.beta_posterior]
)
def test_right_and_wrong_are_symmetric(method, counts):
    k, n = counts
    mirrored = 1 - method(n - k, n, ALPHAS)[:, ::-1]
    np.testing.assert_allclose(method(k, n, ALPHAS), mirrored, atol=1e-9)


def test_methods_agree_on_many_questions():
    n = np.array([1_000, 10_000, 100_000])
    reference = statistics.clt(0.3 * n, n)
    for method in (statistics.wilson, statistics.clopper_pearson, statistics.beta_posterior):
        gap = np.abs(method(0.3 * n, n) - reference).max(axis=(1, 2))
        assert np.all(gap < 3 / n), method.__name__
    data = np.arange(1000) % 10 < 3
    np.testing.assert_allclose(statistics.bootstrap(data, key=KEY), reference[0], atol=3e-3)


@hypothesis.given(successes(60))
def test_shortest_interval_holds_its_mass_and_is_no_longer(counts):
    k, n = counts
    shortest = statistics.beta_posterior(k, n, ALPHAS, kind="hdi")
    equal = statistics.beta_posterior(k, n, ALPHAS)
    mass = np.diff(scipy_special.betainc(1 + k, 1 + n - k, shortest))[:, 0]
    np.testing.assert_allclose(mass, 1 - ALPHAS, atol=1e-9)
    assert np.all(np.diff(shortest) <= np.diff(equal) + 1e-12)


def test_posterior_is_calibrated_exactly():
    # theta ~ U(0, 1): summed over its prior predictive (uniform in k), coverage is nominal.
    n = 12
    ends = statistics.beta_posterior(np.arange(n + 1), n, ALPHAS)
    k = np.arange(n + 1)[:, None, None]
    inside = np.diff(stats.beta.cdf(ends, 1 + k, 1 + n - k))[..., 0].mean(0)
    np.testing.assert_allclose(inside, 1 - ALPHAS, atol=1e-12)


@pytest.mark.parametrize("theta", [0.02, 0.3, 0.5, 0.87, 0.99])
@pytest.mark.parametrize("n", [3, 10, 30])
def test_clopper_pearson_never_covers_less_than_nominal(n, theta):
    k = np.arange(n + 1)
    ends = statistics.clopper_pearson(k, n, ALPHAS)
    inside = (ends[..., 0] <= theta) & (theta <= ends[..., 1])
    assert np.all(stats.binom.pmf(k, n, theta) @ inside >= 1 - ALPHAS)


@hypothesis.given(st.lists(st.integers(0, 1), min_size=2, max_size=40))
def test_clusters_of_one_question_and_one_cluster(outcomes):
    x = np.array(outcomes)
    single = statistics.clustered_clt(x, np.arange(len(x)), ALPHAS)
    np.testing.assert_allclose(single, statistics.clt(x.sum(), len(x), ALPHAS), atol=1e-12)
    together = statistics.clustered_clt(x, np.zeros(len(x), int), ALPHAS)
    np.testing.assert_allclose(np.diff(together), 0, atol=1e-12)


def test_clustered_standard_error_equals_the_double_sum():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=12), rng.integers(0, 4, 12)
    residual = x - x.mean()
    total = sum(
        residual[i] * residual[j] for i in range(12) for j in range(12) if labels[i] == labels[j]
    )
    half = np.diff(statistics.clustered_clt(x, labels))[0, 0] / 2
    assert half == pytest.approx(stats.norm.ppf(0.975) * np.sqrt(total) / 12)


def test_one_cluster_says_less_than_independent_questions():
    interval, _ = statistics.clustered_grid([7], [10])
    assert np.diff(interval) > 1.5 * np.diff(statistics.beta_posterior(7, 10))


def test_large_spread_is_the_binomial():
    y, n, theta = np.arange(6), np.full(6, 5), np.array([0.3])
    ours = clustered._log_beta_binomial(y, n, theta[:, None], np.array([[1e8]]))
    np.testing.assert_allclose(ours[0], stats.binom.logpmf(y, 5, 0.3), atol=1e-5)


def test_padding_clusters_changes_nothing():
    plain = statistics.clustered_grid([2, 3], [5, 4])
    padded = statistics.clustered_grid([2, 3, 0, 0], [5, 4, 0, 0])
    np.testing.assert_allclose(padded[0], plain[0], atol=1e-12)


def test_bootstraps_of_clusters():
    # Every cluster is all right or all wrong: nothing varies inside, much between.
    clusters = np.repeat(np.arange(8), 4)
    x = (clusters % 2).astype(float)
    within = statistics.bootstrap_within(KEY, x, clusters, num_samples=500)
    np.testing.assert_allclose(within, 0.5)
    between = statistics.bootstrap_cluster(KEY, x, clusters, num_samples=4000)
    expected = stats.binom.ppf([0.025, 0.975], 8, 0.5) / 8
    np.testing.assert_allclose(between[0], expected)
    # Clusters of one question, in any order: the plain bootstrap of a mean.
    many = statistics.bootstrap_cluster(KEY, x, np.arange(32)[::-1], num_samples=20_000)
    np.testing.assert_allclose(many, statistics.bootstrap(x, key=KEY), atol=0.04)


@hypothesis.given(successes(80), successes(80))
def test_probabilities_of_being_better_sum_to_one(a, b):
    forward = statistics.probability_greater(*a, *b)
    assert forward + statistics.probability_greater(*b, *a) == pytest.approx(1, abs=1e-9)
    assert statistics.probability_greater(*a, *a) == pytest.approx(0.5, abs=1e-9)


def test_probability_of_being_better_by_quadrature_and_by_draws():
    sides = (14, 20, 9, 17)
    exact = statistics.probability_greater(*sides)
    nearly = statistics.probability_greater(*sides, prior=(1 + 1e-9, 1.0))
    assert nearly == pytest.approx(exact, abs=1e-6)
    a, b = independent.posterior_draws(KEY, *sides, num_samples=40_000)
    assert (a > b).mean() == pytest.approx(exact, abs=0.01)


def test_differences_agree_on_many_questions():
    sides = (7_000, 10_000, 6_500, 10_000)
    reference = statistics.difference_clt(*sides, ALPHAS)
    np.testing.assert_allclose(statistics.difference_newcombe(*sides, ALPHAS), reference, atol=2e-4)
    drawn = statistics.difference_posterior(KEY, *sides, ALPHAS, num_samples=40_000)
    np.testing.assert_allclose(drawn, reference, atol=2e-3)
    odds = statistics.odds_ratio_posterior(KEY, *sides, num_samples=40_000)
    fisher = statistics.odds_ratio_fisher(*sides).interval
    np.testing.assert_allclose(odds, fisher, rtol=0.01)


def test_bca_bootstrap():
    a, b = np.repeat([1, 0], [70, 30]), np.repeat([1, 0], [50, 50])
    interval = statistics.bootstrap_bca(KEY, a, b, num_samples=4000)
    np.testing.assert_allclose(interval, statistics.difference_clt(70, 100, 50, 100)[0], atol=0.03)
    assert np.all(np.isnan(statistics.bootstrap_bca(KEY, np.ones(5), np.ones(5), num_samples=99)))
    odds = statistics.bootstrap_bca(KEY, a, b, statistic="odds_ratio", num_samples=2000)
    assert odds[0] > 1 and odds[0] < 7 / 3 < odds[1]


def test_tests_of_two_proportions():
    assert statistics.p_value_greater(60, 100, 40, 100, "z") == pytest.approx(
        stats.norm.sf(0.2 / np.sqrt(0.5 * 0.5 * 0.02))
    )
    a, b = np.repeat([1, 0], [60, 40]), np.repeat([1, 0], [40, 60])
    welch = stats.ttest_ind(a, b, equal_var=False, alternative="greater").pvalue
    assert statistics.p_value_greater(60, 100, 40, 100, "welch") == pytest.approx(welch)
    with pytest.raises(ValueError, match="'anova' must be one of"):
        statistics.p_value_greater(1, 2, 1, 2, "anova")


def test_cells_sum_to_one_and_are_independent_at_rho_zero():
    rng = np.random.default_rng(0)
    a, b, rho = rng.random(50), rng.random(50), rng.uniform(-0.99, 0.99, 50)
    np.testing.assert_allclose(statistics.cell_probabilities(a, b, rho).sum(0), 1, atol=1e-9)
    cells = statistics.cell_probabilities(a, b, np.zeros(50))
    np.testing.assert_allclose(cells[3], (1 - a) * (1 - b), atol=1e-12)
    close_to_one = statistics.cell_probabilities(a, a, np.full(50, 0.999999))
    np.testing.assert_allclose(close_to_one[0], a, atol=1e-3)


def test_paired_posterior_by_both_proposals():
    cells = np.array([[40, 10, 5, 15], [3, 1, 0, 2]])
    narrow = statistics.paired_posterior(KEY, cells, proposal="posterior", num_samples=20_000)
    wide = statistics.paired_posterior(KEY, cells, proposal="prior", num_samples=100_000)
    np.testing.assert_allclose(narrow.interval(ALPHAS), wide.interval(ALPHAS), atol=0.03)
    np.testing.assert_allclose(
        narrow.probability_positive(), wide.probability_positive(), atol=0.03
    )
    share = narrow.effective_size() / 20_000, wide.effective_size() / 100_000
    assert np.all(share[0] > 2 * share[1])


def test_paired_interval_is_narrower_where_models_agree():
    cells = np.array([45, 8, 4, 43])
    paired = statistics.paired_posterior(KEY, cells).interval()
    unpaired = statistics.difference_posterior(KEY, 53, 100, 49, 100)
    assert np.diff(paired) < 0.8 * np.diff(unpaired)
    dirichlet = statistics.paired_dirichlet(KEY, cells, num_samples=20_000)
    np.testing.assert_allclose(dirichlet, paired, atol=0.03)


def test_paired_clt_of_independent_models_tends_to_the_unpaired():
    rng = np.random.default_rng(1)
    a, b = (rng.random((200, 400)) < [[0.7]]), (rng.random((200, 400)) < [[0.6]])
    paired = np.diff(statistics.paired_clt(a, b)).mean()
    unpaired = np.diff(statistics.difference_clt(a.sum(-1), 400, b.sum(-1), 400)).mean()
    assert paired == pytest.approx(unpaired * np.sqrt(400 / 399), rel=0.01)


def test_mcnemar():
    expected = stats.binomtest(3, 12, 0.5).pvalue
    np.testing.assert_allclose(statistics.mcnemar([[5, 3, 9, 2], [5, 0, 0, 2]]), [expected, 1])


@hypothesis.given(st.lists(st.integers(0, 30), min_size=4, max_size=4), st.integers(0, 100))
def test_metrics_of_counts(counts, other):
    counts = np.array(counts)
    assert 0 <= statistics.f1(counts) <= 1
    assert statistics.f1(counts) == statistics.f1([*counts[:3], other])
    assert -1 <= statistics.matthews(counts) <= 1
    p, r = statistics.precision(counts), statistics.recall(counts)
    if p + r > 0:
        assert statistics.f1(counts) == pytest.approx(2 * p * r / (p + r))
    assert statistics.kappa([5, 0, 0, 7]) == 1


def test_metric_intervals():
    counts = np.array([40, 10, 8, 60])
    posterior = statistics.metric_posterior(KEY, counts)[0]
    bootstrap = statistics.metric_bootstrap(KEY, counts, num_samples=4000)
    np.testing.assert_allclose(posterior, bootstrap, atol=0.04)
    kappa = statistics.metric_posterior(KEY, counts, statistics.kappa)[0]
    assert kappa[0] < statistics.kappa(counts) < kappa[1]


def test_weighted_quantiles_of_equal_weights():
    values = np.random.default_rng(0).normal(size=(2, 5000))
    ours = special.weighted_quantiles(values, np.zeros(5000), ALPHAS)
    np.testing.assert_allclose(ours, special.quantiles(values, ALPHAS), atol=0.05)


def test_the_global_precision_is_left_alone():
    statistics.metric_posterior(KEY, [3, 1, 1, 5])
    assert jnp.ones(()).dtype == jnp.float32
    assert statistics.metric_posterior(KEY, [3, 1, 1, 5]).dtype == np.float64


def test_same_key_same_interval():
    calls = [statistics.bootstrap([1, 0, 1, 1], key=KEY, num_samples=50) for _ in range(2)]
    assert np.array_equal(*calls)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.wilson(5, 4), "from 0 to n"),
        (lambda: statistics.wilson(0, 0), "at least 1 question"),
        (lambda: statistics.clt(1, 4, alphas=5), r"in \(0, 1\)"),
        (lambda: statistics.beta_posterior(1, 4, prior=(0, 1)), "positive"),
        (lambda: statistics.bootstrap([0, 1]), "needs a key"),
        (lambda: statistics.clustered_clt([0, 1], [1, 2, 3]), "one label a question"),
        (lambda: statistics.clustered_grid([3], [2]), "from 0 to n"),
        (lambda: statistics.paired_counts([0, 1], [1]), "must be the same"),
        (lambda: statistics.paired_counts([0, 0.5], [1, 1]), "only 0 and 1"),
        (lambda: statistics.mcnemar([1, 2, 3]), "four whole numbers"),
        (lambda: statistics.report_mean([0.1, np.nan]), "finite"),
        (lambda: statistics.compare([1, 0], [1]), "same_questions=False"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_report_mean_chooses_the_method():
    correct = np.array([1, 1, 0, 1, 1, 1])
    plain = statistics.report_mean(correct)
    np.testing.assert_allclose(
        (plain.lower, plain.upper), statistics.beta_posterior(5, 6)[0], rtol=1e-12
    )
    clustered = statistics.report_mean(correct, clusters=[0, 0, 0, 1, 1, 1])
    assert clustered.method == "clustered posterior"
    assert clustered.upper - clustered.lower > plain.upper - plain.lower
    assert statistics.report_mean(correct, clusters=np.arange(6)) == plain
    scores = np.array([0.2, 0.4, 0.9, 0.5])
    interval = stats.t.interval(0.95, 3, scores.mean(), stats.sem(scores))
    found = statistics.report_mean(scores)
    np.testing.assert_allclose((found.lower, found.upper), interval)
    assert np.isinf(statistics.report_mean([0.3]).upper)


def test_compare_chooses_the_method():
    a, b = np.array([1, 1, 1, 1, 0, 1]), np.array([1, 0, 0, 1, 0, 1])
    same = statistics.compare(a, b)
    assert same.method == "paired posterior" and same.probability_greater > 0.8
    assert same.value == pytest.approx(1 / 3)
    other = statistics.compare(a, b[:5], same_questions=False)
    assert other.method == "two Beta posteriors"
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=20), rng.normal(size=20)
    t = stats.ttest_rel(x, y).confidence_interval()
    found = statistics.compare(x, y)
    np.testing.assert_allclose((found.lower, found.upper), (t.low, t.high))
    assert statistics.compare(x, y, clusters=np.arange(20) // 4).method == "clustered Student t"
    welch = statistics.compare(x, y[:9], same_questions=False)
    low, high = stats.ttest_ind(x, y[:9], equal_var=False).confidence_interval()
    np.testing.assert_allclose((welch.lower, welch.upper), (low, high))


def test_tables(tmp_path):
    path = tmp_path / "maths.csv"
    path.write_text("Question,small,large\n1,0.00,1.00\n1.1,0.00,1.00\n2,1.00,1.00\n")
    table = statistics.load_table(path)
    assert table.models == ("small", "large")
    assert np.array_equal(table.of("large"), [1, 1, 1])
    assert np.array_equal(table.clusters, [0, 0, 1])
    with pytest.raises(KeyError, match="no model 'huge' in the table: it has small, large"):
        table.of("huge")
    path.write_text("a,b\n0,1\n1,0\n")
    assert statistics.load_table(path).clusters is None
    for text, message in (
        ("a,b\n0,1\n2,0\n", "column 'a', question 2: 2 is neither 0 nor 1"),
        ("a,b\n0,yes\n", "'yes' is neither"),
        ("Question\n1\n", "has no outcomes"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            statistics.load_table(path)
