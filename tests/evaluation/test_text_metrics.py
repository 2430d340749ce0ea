"""Text metrics against stored reference scores, definitions and limits."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxllm.evaluation import text_metrics

STORED = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "rouge.json").read_text(encoding="utf-8")
)
WORDS = st.lists(st.sampled_from(["ash", "elm", "oak", "fir"]), max_size=12)


@pytest.mark.parametrize("pair", STORED, ids=lambda pair: pair["generation"][:20] or "empty")
def test_rouge_equals_the_reference_implementation(pair):
    texts = (pair["generation"], pair["reference"])
    found = {"1": text_metrics.rouge_n(*texts), "L": text_metrics.rouge_l(*texts)}
    for kind, overlap in found.items():
        name = f"rouge-{kind}"
        assert overlap.f1 == pytest.approx(pair["scores"][name], abs=1e-9)
        assert overlap.precision == pytest.approx(pair["scores"][f"{name}_precision"], abs=1e-9)
        assert overlap.recall == pytest.approx(pair["scores"][f"{name}_recall"], abs=1e-9)


def lcs(a, b):
    if not a or not b:
        return 0
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
            )
    return table[-1][-1]


@hypothesis.given(WORDS, WORDS)
def test_longest_common_subsequence(a, b):
    assert text_metrics.longest_common_subsequence(a, b) == lcs(a, b)


@hypothesis.given(WORDS, WORDS)
def test_bounds_and_symmetry(a, b):
    first, second = " ".join(a), " ".join(b)
    for metric in (text_metrics.rouge_l, text_metrics.rouge_n):
        forward, backward = metric(first, second), metric(second, first)
        assert forward.f1 == pytest.approx(backward.f1)
        assert forward.precision == backward.recall
        assert 0 <= forward.f1 <= 1
    assert text_metrics.rouge_n(first, second, 2).f1 <= 1
    assert text_metrics.token_f1(first, second) == text_metrics.token_f1(second, first)


def test_rouge_2_counts_pairs_of_words():
    # Two of three pairs are shared.
    assert text_metrics.rouge_n("a b c d", "a b c x", 2).f1 == pytest.approx(2 / 3)


def test_answers_are_normalised():
    assert text_metrics.exact_match(" The Eiffel-Tower!", ["eiffeltower", "no"]) == 1
    assert text_metrics.exact_match("tower", "a tour") == 0
    # Shared: "red", "fox" of 3 and 2 words.
    assert text_metrics.token_f1("the red fox ran", ["a red fox", "dog"]) == pytest.approx(0.8)
    assert text_metrics.token_f1("", "") == 1
    assert text_metrics.token_f1("", "word") == 0
    with pytest.raises(ValueError, match="at least one reference"):
        text_metrics.exact_match("x", [])


def test_bleu_and_chrf():
    if importlib.util.find_spec("sacrebleu") is None:
        with pytest.raises(ImportError, match=r"pip install 'jaxllm\[eval\]'"):
            text_metrics.bleu("a", "a")
        return
    text = "the cat sat on the mat today"
    assert text_metrics.bleu(text, text) == pytest.approx(1)
    assert text_metrics.chrf(text, text) == pytest.approx(1)
    assert text_metrics.chrf("zzz", text) == 0
