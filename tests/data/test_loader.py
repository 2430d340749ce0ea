"""Serving by step: any process count, any resume, mixtures, evaluation."""

import concurrent.futures

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxllm.data import loader as loader_lib
from jaxllm.data import mixture, rows
from jaxllm.data.cache import TokenSplit
from jaxllm.data.errors import DataError

LENGTHS = np.random.default_rng(0).integers(2, 25, 40)


def make_rows(packing="concat", first=1, row_length=8, shuffle=True):
    bounds = first + np.cumsum([0, *LENGTHS])
    documents = [np.arange(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    return rows.PackedRows(TokenSplit.from_documents(documents), row_length, packing, shuffle)


def make_mixture():
    sources = {"a": make_rows(), "b": make_rows("first_fit", 2000), "c": make_rows("pad", 5000)}
    return mixture.Mixture(sources, {"a": 5, "b": 3, "c": 2})


def make_zipped():
    return rows.ZippedRows({"forget": make_rows("pad"), "retain": make_rows("first_fit")})


SOURCES = {"packed": make_rows, "mixture": make_mixture, "zipped": make_zipped}


def flat(batch):
    if not any(isinstance(value, dict) for value in batch.values()):
        return batch
    return {f"{a}/{b}": array for a, part in batch.items() for b, array in part.items()}


def assert_same(left, right):
    left, right = flat(left), flat(right)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def joined(batches):
    batches = [flat(batch) for batch in batches]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("kind", SOURCES)
def test_processes_hold_contiguous_blocks_of_the_same_batches(kind):
    whole = loader_lib.Loader(SOURCES[kind](), 8, seed=3)
    for count in (2, 4):
        parts = [
            loader_lib.Loader(SOURCES[kind](), 8, 3, process_index=i, process_count=count)
            for i in range(count)
        ]
        assert {part.local_batch_size for part in parts} == {8 // count}
        for step in (0, 7, 30, 201):
            assert_same(joined([part.batch(step) for part in parts]), whole.batch(step))
        assert parts[0].fingerprint() == parts[-1].fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("kind", SOURCES)
def test_the_iterator_resumes_at_any_step(kind):
    loader = loader_lib.Loader(SOURCES[kind](), 4, seed=1)
    expected = [loader.batch(step) for step in range(12)]
    for start in (0, 1, 5, 11):
        fresh = loader_lib.Loader(SOURCES[kind](), 4, seed=1, prefetch=3)
        with fresh.iterator(start) as batches:
            for step in range(start, 12):
                assert batches.step == step
                assert_same(next(batches), expected[step])


def test_prefetching_threads_do_not_disturb_each_other():
    loader = loader_lib.Loader(make_mixture(), 4, seed=1)
    steps = [int(s) for s in np.random.default_rng(0).integers(0, 400, 60)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(loader.batch, steps))
    other = loader_lib.Loader(make_mixture(), 4, seed=1)
    for step, batch in zip(steps, results, strict=True):
        assert_same(batch, other.batch(step))


def test_batches_run_through_epochs_without_a_gap():
    loader = loader_lib.Loader(make_rows(), 6, seed=2)
    count = loader.rows.num_rows(2)
    steps = -(-3 * count // 6)
    targets = joined([loader.batch(step) for step in range(steps)])["targets"][: 3 * count]
    for epoch in range(3):
        seen = targets[epoch * count : (epoch + 1) * count]
        seen = seen[seen > 0]
        assert len(np.unique(seen)) == len(seen) == (LENGTHS - 1).sum()
    assert loader.epochs(0) == {"memory": 0.0}
    assert loader.epochs(count // 6)["memory"] == pytest.approx(count // 6 * 6 / count)
    assert loader.steps_per_epoch() == -(-count // 6)
    assert loader.tokens_per_batch == 48


def test_errors_of_the_thread_arrive():
    class Broken(rows.Rows):
        row_length = 4

        def take(self, seed, index):
            raise DataError("row 3 is broken")

    with loader_lib.Loader(Broken(), 1).iterator() as batches:
        with pytest.raises(DataError, match="row 3 is broken"):
            next(batches)


@pytest.mark.parametrize("packing", ["concat", "first_fit", "pad"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_evaluation_covers_every_row_once(packing, count):
    source = make_rows(packing, shuffle=False)
    total = source.num_rows(0)
    assert total % 12  # so that the last batch is filled up
    parts = [
        list(loader_lib.Loader(source, 12, process_index=i, process_count=count).eval_batches())
        for i in range(count)
    ]
    assert {len(part) for part in parts} == {-(-total // 12)}
    seen = joined([joined(list(blocks)) for blocks in zip(*parts, strict=True)])
    assert_same(
        {name: array[:total] for name, array in seen.items()}, source.take(0, np.arange(total))
    )
    for array in seen.values():
        assert not array[total:].any()
    assert len(seen["tokens"]) % 12 == 0


def test_evaluation_of_nested_batches():
    batches = list(loader_lib.Loader(make_zipped(), 16).eval_batches())
    assert len(batches) == 3
    assert not batches[-1]["retain"]["weights"][8:].any()
    with pytest.raises(DataError, match="evaluate its sources one by one"):
        next(loader_lib.Loader(make_mixture(), 4).eval_batches())


@hypothesis.given(st.lists(st.floats(0.001, 10), min_size=1, max_size=5), st.integers(0, 2**40))
def test_mixture_rates_are_exact_in_every_block(rates, seed):
    sources = {str(i): make_rows("pad") for i in range(len(rates))}
    mixed = mixture.Mixture(sources, {str(i): rate for i, rate in enumerate(rates)})
    which, local = mixed.locate(seed, np.arange(3000))
    for i, rate in enumerate(rates):
        counts = [(which[block : block + 1000] == i).sum() for block in (0, 1000, 2000)]
        assert set(counts) == {round(mixed.rates[str(i)] * 1000)}
        assert abs(counts[0] - max(1, rate / sum(rates) * 1000)) <= len(rates)
        assert local[which == i].tolist() == list(range(sum(counts)))
    assert sum(mixed.rates.values()) == pytest.approx(1)


def test_mixture_rows_are_those_of_its_sources():
    mixed = make_mixture()
    assert mixed.rates == {"a": 0.5, "b": 0.3, "c": 0.2}
    batch = mixed.take(4, np.arange(600))
    first = batch["tokens"][:, 0]
    counts = [((first >= low) & (first < high)).sum() for low, high in ((1, 2000), (2000, 5000))]
    which, local = mixed.locate(4, np.arange(600))
    assert counts == [(which == 0).sum(), (which == 1).sum()]
    seed = mixture.fold_seed(4, "b")
    expected = mixed.sources["b"].take(seed, local[which == 1])
    np.testing.assert_array_equal(batch["tokens"][which == 1], expected["tokens"])
    seen = mixed.epochs(4, 600)
    assert set(seen) == {"a/memory", "b/memory", "c/memory"}
    assert seen["c/memory"] == pytest.approx((which == 2).sum() / len(LENGTHS))


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"a": 1}, "one rate a source"),
        ({"a": 1, "b": 0}, "the rate of 'b' is 0"),
        ({"a": 1, "b": float("nan")}, "the rate of 'b' is nan"),
    ],
)
def test_wrong_mixtures_are_refused(rates, message):
    with pytest.raises(DataError, match=message):
        mixture.Mixture({"a": make_rows(), "b": make_rows()}, rates)
    with pytest.raises(DataError, match="different row lengths: {'a': 8, 'b': 4}"):
        sources = {"a": make_rows(), "b": make_rows(row_length=4)}
        mixture.Mixture(sources, {"a": 1, "b": 1})


def test_a_batch_says_where_its_rows_stand():
    loader = loader_lib.Loader(make_rows("pad"), 4)
    rows = len(LENGTHS)
    assert loader.describe(rows // 2) == f"rows {rows // 2 * 4} to {rows // 2 * 4 + 3}, epoch " + (
        f"{rows // 2 * 4 / rows:.3f} of memory"
    )
    mixed = loader_lib.Loader(make_mixture(), 4).describe(3)
    assert mixed.startswith("rows 12 to 15, epoch ") and " of a/memory, " in mixed


def test_wrong_loaders_are_refused():
    with pytest.raises(DataError, match="batch_size is 6; expected a positive multiple of the 4"):
        loader_lib.Loader(make_rows(), 6, process_count=4)
    with pytest.raises(DataError, match="process_index is 2, of 2 processes"):
        loader_lib.Loader(make_rows(), 6, process_index=2, process_count=2)
    with pytest.raises(DataError, match="seed is -1"):
        loader_lib.Loader(make_rows(), 6, seed=-1)
    with pytest.raises(DataError, match="step is -1"):
        loader_lib.Loader(make_rows(), 6).batch(-1)


def test_a_mismatch_on_resume_is_refused_by_name():
    saved = loader_lib.Loader(make_rows(), 8, seed=3).fingerprint()
    loader_lib.check_fingerprint(saved, loader_lib.Loader(make_rows(), 8, seed=3).fingerprint())
    changed = {
        "data.seed is 4, but the checkpoint was trained with 3": (make_rows(), 8, 4),
        "data.batch_size is 4": (make_rows(), 4, 3),
        "data.rows.row_length is 4": (make_rows(row_length=4), 8, 3),
        "data.rows.packing is 'pad'": (make_rows("pad"), 8, 3),
        "data.rows.data is": (make_rows(first=2), 8, 3),
        "data.rows.data is missing in this run": (make_mixture(), 8, 3),
    }
    for message, arguments in changed.items():
        with pytest.raises(DataError, match=message):
            loader_lib.check_fingerprint(saved, loader_lib.Loader(*arguments).fingerprint())
