"""Rows: every token once, segments apart, pure in (seed, epoch, row)."""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxllm.data import planning, rows
from jaxllm.data.cache import TokenSplit
from jaxllm.data.errors import DataError

FIELDS = {"tokens", "targets", "weights", "segment_ids", "positions"}
LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=25)
SEEDS = st.integers(0, 2**40)


def make_split(lengths, weights=False):
    """Documents whose tokens are all different: token t stands at index t - 1 of the data."""
    bounds = np.cumsum([1, *lengths])
    documents = [np.arange(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    values = [d / 1000 for d in documents] if weights else None
    return TokenSplit.from_documents(documents, values)


def check_fields(batch, split):
    assert set(batch) == FIELDS
    for name, array in batch.items():
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
    real = batch["segment_ids"] > 0
    for array in batch.values():
        assert not array[~real].any()
    # Tokens are consecutive numbers, so within a document the target is the next number.
    assert (batch["targets"][real] == batch["tokens"][real] + 1).all()
    expected = 1 if split.weights is None else batch["targets"][real] / np.float32(1000)
    np.testing.assert_allclose(batch["weights"][real], expected, rtol=1e-6)


def check_segments(batch, split):
    """Every segment is one run of one document, counted from 1, positions from 0."""
    document = np.searchsorted(split.offsets, np.arange(split.num_tokens), side="right") - 1
    for row in range(len(batch["tokens"])):
        ids = batch["segment_ids"][row]
        present = ids[ids > 0]
        assert (np.diff(present) >= 0).all()
        assert (ids[: len(present)] > 0).all()
        assert sorted(set(present.tolist())) == list(range(1, ids.max() + 1))
        for segment in range(1, ids.max() + 1):
            here = ids == segment
            tokens = batch["tokens"][row][here]
            assert (np.diff(tokens) == 1).all()
            assert (batch["positions"][row][here] == np.arange(len(tokens))).all()
            owners = document[np.r_[tokens, batch["targets"][row][here]] - 1]
            assert len(set(owners.tolist())) == 1


def all_rows(source, seed, epoch):
    before = sum(source.num_rows(seed, e) for e in range(epoch))
    return source.take(seed, before + np.arange(source.num_rows(seed, epoch)))


@hypothesis.given(LENGTHS, st.integers(1, 17), SEEDS, st.integers(0, 3), st.booleans())
def test_concat_sees_every_token_once(lengths, row_length, seed, epoch, weights):
    split = make_split(lengths, weights)
    source = rows.PackedRows(split, row_length, "concat")
    batch = all_rows(source, seed, epoch)
    check_fields(batch, split)
    check_segments(batch, split)
    real = batch["segment_ids"] > 0
    seen = collections.Counter(batch["targets"][real].tolist())
    firsts = set((split.offsets[:-1] + 1).tolist())
    assert seen == {t: 1 for t in range(1, split.num_tokens + 1) if t not in firsts}
    # Only the end of one row, wherever it stands, may be empty.
    assert (~real).sum() < row_length


@hypothesis.given(
    LENGTHS, st.integers(1, 17), SEEDS, st.integers(0, 2), st.sampled_from(["first_fit", "pad"])
)
def test_whole_documents(lengths, row_length, seed, epoch, packing):
    split = make_split(lengths)
    source = rows.PackedRows(split, row_length, packing)
    batch = all_rows(source, seed, epoch)
    check_fields(batch, split)
    check_segments(batch, split)
    seen = set(batch["targets"][batch["segment_ids"] > 0].tolist())
    expected = set()
    for start, length in zip(split.offsets[:-1], lengths, strict=True):
        expected |= set(range(start + 2, start + 1 + min(length, row_length + 1)))
    assert seen == expected
    if packing == "pad":
        assert len(batch["tokens"]) == len(lengths)
        assert batch["segment_ids"].max() == 1
    statistics = source.statistics(seed, epoch)
    assert statistics["truncated_documents"] == sum(n > row_length + 1 for n in lengths)
    assert statistics["positions"] == len(seen)


@hypothesis.given(st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_first_fit_is_first_fit(lengths):
    room, expected = [], []
    for length in lengths:
        chosen = next((i for i, left in enumerate(room) if left >= length), len(room))
        if chosen == len(room):
            room.append(12)
        room[chosen] -= length
        expected.append(chosen)
    assert planning.first_fit(np.array(lengths), 12).tolist() == expected


@pytest.mark.parametrize("packing", planning.PACKINGS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_pure_in_seed_epoch_and_row(packing, shuffle):
    split = make_split([7, 2, 40, 5, 9, 3, 12, 30, 4], weights=True)
    index = np.array([0, 3, 50, 3, 17, 8])
    first = rows.PackedRows(split, 8, packing, shuffle).take(5, index)
    other = rows.PackedRows(split, 8, packing, shuffle)
    other.take(6, np.arange(40, 60))  # what was asked before does not matter
    singles = [other.take(5, index[i : i + 1]) for i in reversed(range(len(index)))]
    for name in FIELDS:
        joined = np.concatenate([single[name] for single in reversed(singles)])
        np.testing.assert_array_equal(first[name], joined)
    np.testing.assert_array_equal(first["tokens"][1], first["tokens"][3])


def test_seeds_and_epochs_differ_and_the_document_order_is_the_stated_one():
    split = make_split([4] * 30)
    source = rows.PackedRows(split, 3, "pad")
    orders = [
        tuple(all_rows(source, seed, epoch)["tokens"][:, 0].tolist())
        for seed, epoch in ((7, 0), (7, 1), (8, 0), (8, 1))
    ]
    assert len(set(orders)) == 4
    permutation = np.random.default_rng([7, 1]).permutation(30)
    assert orders[1] == tuple((permutation * 4 + 1).tolist())


def test_without_shuffling_rows_follow_the_data():
    split = make_split([5, 4, 8])
    batch = rows.PackedRows(split, 4, "concat", shuffle=False).take(0, np.arange(4))
    assert batch["tokens"].tolist() == [
        [1, 2, 3, 4],
        [6, 7, 8, 10],
        [11, 12, 13, 14],
        [15, 16, 0, 0],
    ]
    assert batch["targets"].tolist() == [
        [2, 3, 4, 5],
        [7, 8, 9, 11],
        [12, 13, 14, 15],
        [16, 17, 0, 0],
    ]
    assert batch["segment_ids"].tolist() == [[1] * 4, [1, 1, 1, 2], [1] * 4, [1, 1, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 0]]


def test_rows_of_one_long_document_do_not_follow_each_other():
    split = make_split([2000])
    tokens = rows.PackedRows(split, 10).take(0, np.arange(100))["tokens"][:, 0]
    assert (np.abs(np.diff(tokens)) == 10).mean() < 0.1


def test_pairs():
    split = TokenSplit.from_documents(
        [np.arange(1, 6), np.arange(11, 13), np.arange(21, 24), np.arange(31, 40)],
        [np.r_[0, 0, 1, 1, 1], np.r_[0, 1], np.r_[0, 1, 1], np.r_[np.zeros(4), np.ones(5)]],
        parts=("chosen", "rejected"),
    )
    batch = rows.PartRows(split, 6, shuffle=False).take(0, np.array([1, 0]))
    assert set(batch) == {"chosen", "rejected"}
    assert batch["chosen"]["tokens"].tolist() == [[21, 22, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0]]
    assert batch["chosen"]["weights"].tolist() == [[1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    assert batch["rejected"]["tokens"].tolist() == [[31, 32, 33, 34, 35, 36], [11, 0, 0, 0, 0, 0]]
    assert batch["rejected"]["weights"].tolist() == [[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0]]
    source = rows.PartRows(split, 6)
    assert source.statistics()["truncated_documents"] == 1
    for seed in range(4):
        both = source.take(seed, np.arange(2))
        pairs = zip(both["chosen"]["tokens"][:, 0], both["rejected"]["tokens"][:, 0], strict=True)
        assert set(pairs) == {(1, 11), (21, 31)}


def test_zipped_sources_have_epochs_of_their_own():
    forget = rows.PackedRows(make_split([3] * 4), 4, "pad")
    retain = rows.PackedRows(make_split([3] * 10), 4, "pad")
    source = rows.ZippedRows({"forget": forget, "retain": retain})
    batch = source.take(1, np.arange(20))
    first = {name: part["tokens"][:, 0].tolist() for name, part in batch.items()}
    for epoch in range(5):
        assert sorted(first["forget"][4 * epoch : 4 * epoch + 4]) == [1, 4, 7, 10]
    for epoch in range(2):
        assert sorted(first["retain"][10 * epoch : 10 * epoch + 10]) == list(range(1, 31, 3))
    assert source.num_rows(1) == 4
    assert rows.ZippedRows(source.sources, anchor="retain").num_rows(1) == 10
    assert source.epochs(1, 10) == {"forget/memory": 2.5, "retain/memory": 1.0}
    with pytest.raises(DataError, match="anchor 'both' is none of forget, retain"):
        rows.ZippedRows(source.sources, anchor="both")


def test_epochs_are_counted():
    split = make_split([5] * 6)
    source = rows.PackedRows(split, 4, "pad")
    assert source.epochs(0, 9) == {"memory": 1.5}
    fitted = rows.PackedRows(make_split([3, 9, 4, 7, 2, 5, 8, 6] * 3), 10, "first_fit")
    counts = [fitted.num_rows(3, epoch) for epoch in range(5)]
    epoch, row = fitted.locate(3, np.arange(sum(counts)))
    assert np.bincount(epoch).tolist() == counts
    assert row.tolist() == [i for count in counts for i in range(count)]


def test_wrong_arguments_are_refused():
    split = make_split([3, 4])
    with pytest.raises(DataError, match="packing is 'best_fit'; expected concat, first_fit, pad"):
        rows.PackedRows(split, 4, "best_fit")
    with pytest.raises(DataError, match="row_length is 0"):
        rows.PackedRows(split, 0)
    with pytest.raises(DataError, match="use PackedRows"):
        rows.PartRows(split, 4)
    with pytest.raises(DataError, match="fewer than two tokens"):
        rows.PackedRows(make_split([3, 1]), 4)
    with pytest.raises(DataError, match="row indices"):
        rows.PackedRows(split, 4).take(0, np.array([-1]))
