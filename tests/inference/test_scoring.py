"""Scores against the plain forward pass, whatever the batching, and against stored perplexities."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.inference import scoring, scoring_steps
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.hf import load_hf
from jaxllm.models.parameters import init_params
from jaxllm.models.quantized import quantize_params

RNG = np.random.default_rng(0)
REQUESTS = [
    (RNG.integers(0, 40, 1 + i % 7).tolist(), RNG.integers(0, 40, 1 + (3 * i) % 11).tolist())
    for i in range(13)
]


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=40,
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        mlp_dim=24,
        initializer_range=0.4,
        logit_softcap=5.0,
    )
    return config, init_params(config, jax.random.key(0))


@pytest.fixture(scope="module")
def logs(model):
    """log p of every next token [T, V] of a sequence, by the plain forward pass."""
    config, params = model
    run = jax.jit(lambda tokens: jax.nn.log_softmax(forward(config, params, tokens).logits))

    def of(tokens):
        padded = jnp.asarray([[*tokens, *[0] * (32 - len(tokens))]])  # causal: padding is unseen
        return np.asarray(run(padded))[0, : len(tokens)]

    return of


def test_continuations_equal_the_forward_pass(model, logs):
    scores = scoring.score_continuations(*model, REQUESTS, batch_size=4)
    for (context, continuation), score in zip(REQUESTS, scores, strict=True):
        rows = logs([*context, *continuation])[len(context) - 1 : -1]
        expected = rows[np.arange(len(continuation)), continuation]
        np.testing.assert_allclose(score.log_probs, expected, atol=1e-5)
        assert score.total == pytest.approx(expected.sum(), abs=1e-4)
        assert score.is_greedy == bool((rows.argmax(-1) == continuation).all())


def test_greedy_continuation_is_recognised(model, logs):
    tokens = [3, 1, 4]
    for _ in range(4):
        tokens.append(int(logs(tokens)[-1].argmax()))
    (greedy, other) = scoring.score_continuations(
        *model, [(tokens[:3], tokens[3:]), (tokens[:3], [*tokens[3:6], (tokens[6] + 1) % 40])]
    )
    assert greedy.is_greedy and not other.is_greedy


def test_batching_changes_nothing(model):
    together = scoring.score_continuations(*model, REQUESTS, batch_size=13)
    alone = scoring.score_continuations(*model, REQUESTS, batch_size=1)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


def test_continuations_of_one_context_equal_the_forward_pass(model, logs, monkeypatch):
    contexts = [RNG.integers(0, 40, size).tolist() for size in (17, 22, 16, 20)]
    sizes = [(1, 4, 2, 4), (1, 1, 1, 1, 1), (3, 3), (1,)]
    requests = [
        (context, RNG.integers(0, 40, size).tolist())
        for context, counts in zip(contexts, sizes, strict=True)
        for size in counts
    ]
    rows = []
    monkeypatch.setattr(
        scoring.scoring_steps, "row_scores", lambda *args: rows.append(args) or row_scores(*args)
    )
    order = RNG.permutation(len(requests))
    scores = scoring.score_continuations(*model, [requests[i] for i in order], batch_size=4)
    # Only the context that stands alone runs as a row.
    assert len(rows) == 1 and rows[0][2].shape[0] == 1
    for place, score in zip(order, scores, strict=True):
        context, continuation = requests[place]
        expected = logs([*context, *continuation])[len(context) - 1 : -1]
        np.testing.assert_allclose(
            score.log_probs, expected[np.arange(len(continuation)), continuation], atol=1e-5
        )
        assert score.is_greedy == bool((expected.argmax(-1) == continuation).all())


row_scores = scoring_steps.row_scores


def test_long_contexts_are_cut_on_the_left(model):
    context, continuation = list(range(30)), [5, 6]
    (cut,) = scoring.score_continuations(*model, [(context, continuation)], max_length=8)
    (short,) = scoring.score_continuations(*model, [(context[-6:], continuation)])
    np.testing.assert_allclose(cut.log_probs, short.log_probs, atol=1e-5)


@pytest.mark.parametrize(("max_length", "stride"), [(8, 8), (8, 3), (8, 1), (50, 50)])
def test_perplexity_equals_a_plain_loop_over_windows(model, logs, max_length, stride):
    tokens = RNG.integers(0, 40, 29).tolist()
    total, count, seen = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + max_length, len(tokens))
        window = tokens[begin:end]
        rows = logs(window)
        for place in range(1, len(window)):
            if begin + place >= seen:
                total -= rows[place - 1, window[place]]
                count += 1
        seen = end
        if end == len(tokens):
            break
    found = scoring.perplexity(*model, tokens, max_length=max_length, stride=stride, size=100)
    assert found.tokens == count
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / 100, rel=1e-5)


def test_every_token_is_scored_once_with_overlapping_windows(model):
    tokens = RNG.integers(0, 40, 41).tolist()
    full = scoring.perplexity(*model, tokens, max_length=64)
    assert full.tokens == 40
    near = scoring.perplexity(*model, tokens, max_length=32, stride=1)
    far = scoring.perplexity(*model, tokens, max_length=4, stride=4)
    assert near.tokens == 40
    assert abs(near.perplexity - full.perplexity) < abs(far.perplexity - full.perplexity)


def test_a_quantised_head_is_scored_by_its_own_product(model):
    config, params = model
    packed = quantize_params(params, bits=8)
    plain = scoring.score_continuations(config, params, REQUESTS[:3])
    close = scoring.score_continuations(config, packed, REQUESTS[:3])
    for a, b in zip(plain, close, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=0.15)


class Pieces:
    """Words and spaces; a space joins the word after it. 1 begins a text."""

    bos_id, eos_id = 1, 2

    def __init__(self, bos: bool = True):
        self._bos, self.table = bos, {}

    def encode(self, text, add_special=False):
        import re

        pieces = re.findall(r" ?[^ ]+| +", text)
        ids = [self.table.setdefault(piece, 3 + len(self.table)) for piece in pieces]
        return [1, *ids] if add_special and self._bos else ids


def test_pairs_are_cut_from_the_joint_encoding():
    tokenizer = Pieces()
    assert scoring.encode_pair(tokenizer, "the sky is", " blue") == ([1, 3, 4, 5], [6])
    # The space moves over: " blue" is one token.
    assert scoring.encode_pair(tokenizer, "the sky is ", "blue") == ([1, 3, 4, 5], [6])
    # "isblue" is one token, which begins in the context.
    assert scoring.encode_pair(tokenizer, "the sky is", "blue") == ([1, 3, 4], [7])
    assert scoring.encode_pair(tokenizer, "", "the")[0] == [1]
    assert scoring.encode_pair(Pieces(bos=False), "", "the")[0] == [1]


def test_choices(model):
    tokenizer = Pieces()
    questions = [("one two", [" three", " four five"]), ("six", [" seven", " a", " b c"])]
    found = scoring.score_choices(*model, tokenizer, questions)
    for (context, answers), choices in zip(questions, found, strict=True):
        pairs = [scoring.encode_pair(tokenizer, context, answer) for answer in answers]
        totals = [score.total for score in scoring.score_continuations(*model, pairs)]
        np.testing.assert_allclose(choices.log_probs, totals, atol=1e-5)
        assert choices.num_bytes.tolist() == [len(answer) for answer in answers]
        assert choices.num_tokens.tolist() == [len(pair[1]) for pair in pairs]
    choices = scoring.Choices(
        np.array([-4.0, -5.0, -6.0]), np.array([1, 2, 2]), np.array([4, 3, 9])
    )
    assert [choices.best(by) for by in ("sum", "tokens", "bytes")] == [0, 1, 2]


def test_few_programs_for_many_lengths(model):
    before = scoring_steps.row_scores._cache_size()
    for size in range(2, 32):
        scoring.score_continuations(*model, [([1] * size, [2])] * 16)
    assert scoring_steps.row_scores._cache_size() - before <= 3


@pytest.mark.parametrize("name", ["stories260k", "babyllama-char105"])
def test_a_real_checkpoint_has_the_stored_perplexity(shared_dir, name):
    config, params = load_hf(shared_dir / "data" / "models" / name)
    with np.load(shared_dir / "golden" / "models" / f"{name}.npz") as golden:
        tokens, expected = golden["nll_ids"].tolist(), golden["nll"]
    (score,) = scoring.score_continuations(config, params, [(tokens[:1], tokens[1:])])
    np.testing.assert_allclose(-score.log_probs, expected, atol=2e-4)
    found = scoring.perplexity(config, params, tokens, max_length=len(tokens))
    assert found.perplexity == pytest.approx(math.exp(expected.mean()), rel=1e-4)


def test_bad_requests_are_refused(model):
    for call, message in (
        (lambda: scoring.score_continuations(*model, [([], [1])]), "request 0: the context"),
        (lambda: scoring.score_continuations(*model, [([1], [1]), ([1], [])]), "request 1"),
        (lambda: scoring.score_continuations(*model, [([1], [40])]), "vocabulary of 40"),
        (
            lambda: scoring.score_continuations(*model, [([1], [2] * 9)], max_length=9),
            "leaves no room",
        ),
        (lambda: scoring.score_continuations(*model, [([1], [2])], batch_size=0), "batch_size=0"),
        (lambda: scoring.perplexity(*model, [1], max_length=4), "at least 2 tokens"),
        (lambda: scoring.perplexity(*model, [1, 2], max_length=4, stride=5), "stride=5"),
        (lambda: scoring.Perplexity(1.0, 1).bits_per_byte, "size of the text"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
