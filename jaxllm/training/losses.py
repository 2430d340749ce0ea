"""Cross-entropy over the vocabulary: plain, recomputed in chunks, and fused with its gradients.

For hidden states h, a head W, targets t and weights w, with logits l = h W (or c tanh(h W / c)):

    total = sum_i w_i [ logsumexp(l_i) - l_i[t_i] + z * logsumexp(l_i)^2 ]

The z term keeps the normaliser near one (PaLM, arXiv:2204.02311, section 5).

| function               | keeps the logits of     | cotangents                 | derivatives |
|------------------------|-------------------------|----------------------------|-------------|
| `cross_entropy`        | all rows                | through `total` and parts  | any order   |
| `token_log_probs`      | one chunk (recomputed)  | one a token                | any order   |
| `fused_cross_entropy`  | one chunk               | through `total`            | first order |

The fused loss forms the gradients with respect to h and W inside the forward pass, while a chunk's
logits are at hand, so that the backward pass only scales them: three products with W instead of
four, and logits are never stored. On a mesh it goes by blocks of the vocabulary instead of chunks
of rows (`sharded_head`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.training import sharded_head, sharding
from jaxllm.training.sharded_head import Options, Rows


class LossSums(NamedTuple):
    """Weighted sums over tokens; `total` is what to differentiate.

    Attributes:
      total: cross-entropy plus the z term.
      cross_entropy: negative log-likelihood in nats.
      z_loss: the z term alone (its coefficient included).
      correct: weight of the tokens whose target has the largest logit.
      weight: sum of the weights.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    z_loss: Float[Array, ""]
    correct: Float[Array, ""]
    weight: Float[Array, ""]


def cross_entropy(
    logits: Float[Array, "... V"],
    targets: Int[Array, ...],
    weights: Float[Array, ...] | None = None,
    *,
    z_loss: float = 0.0,
) -> LossSums:
    """Weighted sums of the cross-entropy of logits that are already there (soft cap included)."""
    _check_rows("logits", logits.shape, targets, weights)
    logits = _widen(logits)
    weights = _weights(weights, targets, logits.dtype)
    rows = _rows(logits, targets)
    return _sums(rows, weights, z_loss)


class TokenScores(NamedTuple):
    """What scoring needs of every token.

    Attributes:
      log_probs: log p(target).
      correct: 1 where the target has the largest logit, else 0.
    """

    log_probs: Float[Array, "... T"]
    correct: Float[Array, "... T"]


def token_log_probs(
    hidden: Float[Array, "... T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "... T"],
    *,
    vocab_axis: int = 1,
    softcap: float | None = None,
    chunk: int = 512,
) -> Float[Array, "... T"]:
    """log p(target) of every token: the first field of `token_scores`."""
    scores = token_scores(
        hidden, head, targets, vocab_axis=vocab_axis, softcap=softcap, chunk=chunk
    )
    return scores.log_probs


def token_scores(
    hidden: Float[Array, "... T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "... T"],
    *,
    vocab_axis: int = 1,
    softcap: float | None = None,
    chunk: int = 512,
) -> TokenScores:
    """Scores of every token, with the logits of about `chunk` tokens in memory at a time.

    The backward pass recomputes them, so that each token may have its own cotangent: what sequence
    log-probabilities of preference methods need.

    Args:
      hidden: hidden states after the final norm.
      head: [D, V], or [V, D] with `vocab_axis=0` (a tied embedding, used without transposing it).
      targets: token ids.
      vocab_axis: which axis of `head` is the vocabulary.
      softcap: c of c * tanh(logits / c).
      chunk: tokens whose logits a device holds at once.
    """
    hidden, targets, _, shape = _as_batch(hidden, head, targets, None, vocab_axis)
    options = Options(vocab_axis, softcap, 0.0, chunk)

    def local(hidden, head, targets):
        chunks = _num_chunks(targets.shape, chunk)

        @jax.checkpoint
        def body(_, block):
            h, t = block
            logits, _ = _logits(h, head, options)
            rows = _rows(logits, t)
            return None, TokenScores(-rows.nll, rows.correct)

        _, scores = jax.lax.scan(body, None, (_split(hidden, chunks), _split(targets, chunks)))
        return jax.tree.map(lambda x: _join(x, targets.shape[1]), scores)

    over = _over_rows(local, targets.shape, (True, False, True))
    return jax.tree.map(lambda x: x.reshape(shape), over(hidden, head, targets))


def fused_cross_entropy(
    hidden: Float[Array, "... T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "... T"],
    weights: Float[Array, "... T"] | None = None,
    *,
    vocab_axis: int = 1,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int = 512,
) -> LossSums:
    """Weighted sums of the cross-entropy of `hidden @ head`, gradients formed in the forward pass.

    Only `total` may be differentiated, and only once and in reverse mode; the other sums are
    constants to the gradient. Use `cross_entropy` for Hessian products and gradient penalties.

    Args:
      hidden: hidden states after the final norm; products are taken in their dtype, sums in
        float32.
      head: [D, V], or [V, D] with `vocab_axis=0` (a tied embedding, used without transposing it).
      targets: token ids; where the weight is 0 any number may stand.
      weights: weight of each token; None = 1.
      vocab_axis: which axis of `head` is the vocabulary.
      softcap: c of c * tanh(logits / c).
      z_loss: coefficient z of the squared log-normaliser.
      chunk: tokens whose logits a device holds at once. Any number of tokens works: the last chunk
        is padded.
    """
    hidden, targets, weights, _ = _as_batch(hidden, head, targets, weights, vocab_axis)
    weights = _weights(weights, targets, jnp.promote_types(hidden.dtype, jnp.float32))
    options = Options(vocab_axis, softcap, z_loss, chunk)
    return _fused(options, hidden, head, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options: Options, hidden, head, targets, weights) -> LossSums:
    if sharded_head.applies(targets.shape):
        rows = sharded_head.rows(options, hidden, head, targets)
        return _sums(rows, weights, options.z_loss)

    def body(_, block):
        h, t, w = block
        logits, _ = _logits(h, head, options)
        return None, _sums(_rows(logits, t), w, options.z_loss)

    _, sums = jax.lax.scan(body, None, _blocks(options, hidden, targets, weights))
    return jax.tree.map(lambda x: x.sum(0), sums)


def _fused_forward(options: Options, hidden, head, targets, weights):
    if sharded_head.applies(targets.shape):
        rows, hidden_grad, head_grad = sharded_head.rows_and_gradients(
            options, hidden, head, targets, weights
        )
        per_token = _per_token(rows, options)
        sums = _sums(rows, weights, options.z_loss)
        return sums, (hidden_grad, head_grad, per_token.astype(weights.dtype))

    def body(head_grad, block):
        h, t, w = block
        grad, rows = _logit_gradient(h, head, t, w, options)
        contract = ((2,), (options.vocab_axis,))
        hidden_grad = _dot(grad, head.astype(h.dtype), contract).astype(h.dtype)
        head_grad = head_grad + _dot(h, grad, ((0, 1), (0, 1)))
        return head_grad, (_sums(rows, w, options.z_loss), hidden_grad, _per_token(rows, options))

    # Summed as [D, V] in either case: a product whose rows are the hidden dimension is the
    # faster one (1.5 times on a CPU), and transposing the sum once costs little.
    shape = (hidden.shape[-1], head.shape[options.vocab_axis])
    start = jnp.zeros(shape, jnp.promote_types(hidden.dtype, jnp.float32))
    blocks = _blocks(options, hidden, targets, weights)
    head_grad, (sums, hidden_grad, per_token) = jax.lax.scan(body, start, blocks)
    head_grad = head_grad if options.vocab_axis == 1 else head_grad.T
    length = hidden.shape[1]
    per_token = _join(per_token, length).astype(weights.dtype)
    gradients = (_join(hidden_grad, length), head_grad.astype(head.dtype), per_token)
    return jax.tree.map(lambda x: x.sum(0), sums), gradients


def _per_token(rows: Rows, options: Options):
    return rows.nll + options.z_loss * rows.log_normalizer**2


def _logit_gradient(h, head, t, w, options: Options):
    """d total / d logits [B, C, V] of one chunk, in the dtype of h, and its per-token values."""
    logits, slope = _logits(h, head, options)
    rows = _rows(logits, t)
    probs = jnp.exp(logits - rows.log_normalizer[..., None])
    pull = w * (1.0 + 2.0 * options.z_loss * rows.log_normalizer)
    is_target = jax.lax.broadcasted_iota(t.dtype, logits.shape, 2) == t[..., None]
    grad = probs * pull[..., None] - jnp.where(is_target, w[..., None], 0.0)
    return (grad if slope is None else grad * slope).astype(h.dtype), rows


def _fused_backward(options: Options, residuals, cotangents: LossSums):
    del options
    hidden_grad, head_grad, weights_grad = residuals
    scale = cotangents.total

    def scaled(x):
        return (x * scale).astype(x.dtype)

    return scaled(hidden_grad), scaled(head_grad), None, scaled(weights_grad)


_fused.defvjp(_fused_forward, _fused_backward)


def _over_rows(function, shape: tuple[int, ...], by_row_in: tuple[bool, ...]):
    """Runs a function on each shard of [B, T] rows, where a mesh splits them.

    Left to the partitioner, every chunk of the scan would end in a collective. The vocabulary stays
    with the partitioner.

    Args:
      function: of arrays, with results that are all split by rows.
      shape: [B, T].
      by_row_in: whether each argument is split by rows or is the same for all.
    """
    rows = sharding.active_spec(shape, ("batch", "length"))
    axes = sharding.mesh_axes(*rows)
    if not axes:
        return function
    return jax.shard_map(
        function,
        in_specs=tuple(rows if by_row else PartitionSpec() for by_row in by_row_in),
        out_specs=rows,
        axis_names=set(axes),
        check_vma=False,
    )


def _blocks(options: Options, hidden, targets, weights):
    chunks = _num_chunks(targets.shape, options.chunk)
    return tuple(_split(x, chunks) for x in (hidden, targets, weights))


def _logits(h, head, options: Options):
    """Logits [B, C, V] in at least float32, and d(capped)/d(raw) (None without a cap)."""
    logits = _dot(h, head.astype(h.dtype), ((2,), (1 - options.vocab_axis,)))
    if options.softcap is None:
        return logits, None
    ratio = jnp.tanh(logits / options.softcap)
    return options.softcap * ratio, 1.0 - ratio**2


def _dot(a, b, contract):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=dtype)


def _rows(logits, targets) -> Rows:
    largest = jax.lax.stop_gradient(logits.max(-1))
    log_normalizer = largest + jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    correct = (at_target >= largest).astype(logits.dtype)
    return Rows(log_normalizer - at_target, log_normalizer, jax.lax.stop_gradient(correct))


def _sums(rows: Rows, weights, z_loss: float) -> LossSums:
    nll = (rows.nll * weights).sum()
    z_term = z_loss * (rows.log_normalizer**2 * weights).sum()
    return LossSums(nll + z_term, nll, z_term, (rows.correct * weights).sum(), weights.sum())


def _num_chunks(shape: tuple[int, ...], chunk: int) -> int:
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token.")
    batch, length = shape
    per_row = max(1, min(length, chunk // max(1, batch)))
    return max(1, -(-length // per_row))


def _split(x, chunks: int):
    """[B, T, ...] -> [chunks, B, ceil(T / chunks), ...], zero-padded.

    A chunk takes every `chunks`-th position: the chunk index is the minor part of time, so that
    shards of rows and contiguous shards of time would stay on their devices.
    """
    pad = -x.shape[1] % chunks
    if pad:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], x.shape[1] // chunks, chunks, *x.shape[2:])
    return jnp.moveaxis(x, 2, 0)


def _join(x, length: int):
    """Undoes `_split`."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _as_batch(hidden, head, targets, weights, vocab_axis: int):
    if vocab_axis not in (0, 1) or head.ndim != 2 or head.shape[1 - vocab_axis] != hidden.shape[-1]:
        raise ValueError(
            f"head {head.shape} with vocab_axis={vocab_axis} does not fit hidden {hidden.shape}: "
            "expected [D, V] with vocab_axis=1 or [V, D] with vocab_axis=0."
        )
    _check_rows("hidden", hidden.shape, targets, weights)
    shape = targets.shape
    length = shape[-1] if shape else 1
    batch = int(np.prod(shape[:-1], dtype=int))
    reshaped = (x if x is None else x.reshape(batch, length) for x in (targets, weights))
    return hidden.reshape(batch, length, hidden.shape[-1]), *reshaped, shape


def _check_rows(name: str, shape, targets, weights) -> None:
    for other, x in (("targets", targets), ("weights", weights)):
        if x is not None and x.shape != shape[:-1]:
            raise ValueError(
                f"{other} {x.shape} do not fit {name} {tuple(shape)}: expected {tuple(shape[:-1])}."
            )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integers, got {targets.dtype}.")


def _weights(weights, targets, dtype):
    return jnp.ones(targets.shape, dtype) if weights is None else weights.astype(dtype)


def _widen(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
