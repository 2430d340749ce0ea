"""What the kernel for TPUs does with a block of packed tokens.

Matrix units take the packed numbers as they are, as 8-bit integers: converting them to bfloat16,
and pushing twice the bytes, would take longer than reading them. The other side of each product,
queries and softmax weights, has few rows. It goes in as fixed point cut into 8-bit digits, one more
row each, so that nothing is lost to rounding to 8 bits:

    q.k = step (d2 2^16 + d1 2^8 + d0).stored + q.low,    step d = q scale

with the scale of the keys folded into the queries (per group of tokens), and that of the values
into the weights. Products of digits and stored numbers are exact.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_kv_attention.layout import BLOCK
from pallas_kernels.quantized_kv_attention.reference import HIDDEN

# Queries are rounded to 22 bits, which a float32 has left after adding this number.
_MAGIC = 12582912.0
_QUERY_TOP = 2**22 - 2**16
_LEAST = 1e-30
_WEIGHT_BITS = 30


def kernel(
    lengths,
    q_ref,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    recent_k,
    recent_v,
    seen_ref,
    out_ref,
    top_ref,
    total_ref,
    sum_ref,
    digits_ref,
    *,
    key_bits: int,
    value_bits: int,
    softcap: float | None,
):
    heads, tokens = key_codes.shape[1], key_codes.shape[-1]
    step = pl.program_id(3)
    left = lengths[pl.program_id(0)] - step * tokens  # Visible tokens from this block on.
    first = step == 0

    # One straight line of code a block: heads and recent tokens fill each other's waiting times.
    @pl.when(first | (left > 0))
    def _():
        seen = (seen_ref[0] != 0) & first
        scores = functools.partial(
            _scores, q_ref, key_codes, key_scales, left=left, bits=key_bits, softcap=softcap
        )
        values = functools.partial(_values, value_codes, value_scales, digits_ref, bits=value_bits)
        waiting, parts = scores(0), []
        for h in range(heads):
            following = scores(h + 1) if h + 1 < heads else None
            recent = _recent(q_ref[0, h], recent_k[0, h], recent_v[0, h], seen, softcap)
            parts.append([recent, values(h, waiting)])
            waiting = following
        for h in range(heads):
            before = (top_ref[h], total_ref[h], sum_ref[h])
            before = tuple(
                jnp.where(first, start, x)
                for start, x in zip((HIDDEN, 0.0, 0.0), before, strict=True)
            )
            top, total, summed = _merge([before, *parts[h]])
            top_ref[h], total_ref[h], sum_ref[h] = top, total, summed
            out = summed / jnp.maximum(total, _LEAST)
            # Where everything is hidden, all weights are of equal size.
            out_ref[0, h] = jnp.where(top > HIDDEN / 2, out, 0).astype(out_ref.dtype)


def _scores(q_ref, codes, scales, h, *, left, bits, softcap):
    """q.k of a block, [rows, tokens], hidden where a token is not there."""
    q = q_ref[0, h]
    tokens, groups = codes.shape[-1], scales.shape[-2]
    group = tokens // groups
    largest = scales[0, h, 0].astype(jnp.float32).max(axis=0, keepdims=True)
    size = (jnp.abs(q) * largest).max(axis=-1, keepdims=True)
    step = jnp.maximum(size, _LEAST) * (1 / _QUERY_TOP)
    scaled = q / step
    keys = _unpacked(codes[0, h], bits)

    # Blocks of 128 tokens; `each` groups in a block where they are smaller.
    count, each = tokens // BLOCK, max(1, BLOCK // group)

    def row(kind, block, part):
        number = block * each + part if group <= BLOCK else block * BLOCK // group
        return scales[0, h, kind, number : number + 1].astype(jnp.float32)

    digits = [
        jnp.concatenate([_digits(scaled * row(0, j, part)) for part in range(each)], axis=0)
        for j in range(count)
    ]
    products = _block_products(digits, keys)
    lane = jax.lax.broadcasted_iota(jnp.int32, (q.shape[0], BLOCK), 1)
    out = []
    for j, product in enumerate(products):
        terms = [
            _undigit(part) * step + (q * row(1, j, i)).sum(axis=-1, keepdims=True)
            for i, part in enumerate(jnp.split(product, each, axis=0))
        ]
        score = terms[0]
        for i in range(1, each):
            score = jnp.where(lane >= i * group, terms[i], score)
        if softcap is not None:
            score = softcap * jnp.tanh(score * (1 / softcap))
        out.append(jnp.where(lane < left - j * BLOCK, score, HIDDEN))
    return jnp.concatenate(out, axis=1)


def _block_products(digits, keys):
    """digits[j] @ keys[:, block j], two blocks in one product.

    Side by side in the dimension that is summed over they fill matrix units of 256 x 256.
    """
    out = []
    for j in range(0, len(digits), 2):
        blocks = [keys[:, i * BLOCK : (i + 1) * BLOCK] for i in range(j, min(j + 2, len(digits)))]
        if len(blocks) == 1:
            out.append(jnp.dot(digits[j], blocks[0], preferred_element_type=jnp.int32))
            break
        nothing = jnp.zeros_like(digits[j])
        left = jnp.concatenate([digits[j], nothing], axis=1)
        right = jnp.concatenate([nothing, digits[j + 1]], axis=1)
        product = jnp.dot(
            jnp.concatenate([left, right], axis=0),
            jnp.concatenate(blocks, axis=0),
            preferred_element_type=jnp.int32,
        )
        out += jnp.split(product, 2, axis=0)
    return out


def _values(codes, scales, digits_ref, h, score, *, bits):
    """(top, total, sum) of a block's weights and weighted values, for `_merge`."""
    rows, tokens = score.shape
    groups, width = scales.shape[-2], codes.shape[-1]
    scale = scales[0, h, 0].astype(jnp.float32)
    low = scales[0, h, 1].astype(jnp.float32)
    # Weights are at most 1: this gain makes fixed point of weight * scale, and is taken out by the
    # merge, as if the top score were less.
    largest = jnp.maximum(scale.max(axis=1, keepdims=True).max(axis=0, keepdims=True), 2.0**-60)
    top = score.max(axis=1, keepdims=True) - jnp.log(2.0**_WEIGHT_BITS / largest)
    weight = jnp.exp(score - top)
    # Four signed digits of a 32-bit word are its bytes once 128 is added to and taken from each.
    digits = [
        pltpu.bitcast(
            ((weight * scale[i : i + 1]).astype(jnp.int32) + 0x00808080) ^ 0x00808080, jnp.int8
        )
        for i in range(groups)
    ]
    planes = [
        plane.reshape(tokens // BLOCK, BLOCK * bits // 8, width)
        for plane in _planes(codes[0, h], bits)
    ]
    stored = jnp.concatenate(planes, axis=1).reshape(tokens, width)
    product = jnp.dot(jnp.concatenate(digits, axis=0), stored, preferred_element_type=jnp.int32)
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    out = None
    for i in range(groups):
        part = _undigit_rows(product[i * 4 * rows : (i + 1) * 4 * rows], digits_ref, h * groups + i)
        part = part + (weight * low[i : i + 1]).sum(axis=1, keepdims=True)
        out = part if out is None else jnp.where(lane >= i * width // groups, part, out)
    return top, weight.sum(axis=1, keepdims=True), out


def _recent(q, k, v, seen, softcap):
    """The same of recent tokens, in their own type with the queries in two parts."""
    score = _two_part_dot(q, k, (((1,), (1,)), ((), ())))
    if softcap is not None:
        score = softcap * jnp.tanh(score * (1 / softcap))
    score = jnp.where(seen, score, HIDDEN)
    top = score.max(axis=1, keepdims=True)
    weight = jnp.exp(score - top)
    return (
        top,
        weight.sum(axis=1, keepdims=True),
        _two_part_dot(weight, v, (((1,), (0,)), ((), ()))),
    )


def _two_part_dot(x, y, dimensions):
    """A product whose left side is nearly float32, though the right side is bfloat16."""
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=dimensions, preferred_element_type=jnp.float32
    )
    if y.dtype != jnp.bfloat16:
        return product(x, y.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    coarse = x.astype(jnp.bfloat16)
    fine = (x - coarse.astype(jnp.float32)).astype(jnp.bfloat16)
    return product(coarse, y) + product(fine, y)


def _merge(parts):
    """Weighted sums over several sets of tokens as one: (top score, sum of weights, of values)."""
    top = functools.reduce(jnp.maximum, [part[0] for part in parts])
    factors = [jnp.exp(part[0] - top) for part in parts]
    total = sum(f * part[1] for f, part in zip(factors, parts, strict=True))
    return top, total, sum(f * part[2] for f, part in zip(factors, parts, strict=True))


def _digits(x):
    """Three signed 8-bit digits of numbers below 2^22, [3 rows, ...], the lowest first."""
    bits = pltpu.bitcast(x + _MAGIC, jnp.int32)  # The number stands in the lowest bits.
    middle = (bits + (128 - 0x400000)) >> 8
    return jnp.concatenate([bits, middle, (middle + 128) >> 8], axis=0).astype(jnp.int8)


def _undigit(product):
    low, middle, high = jnp.split(product, 3, axis=0)
    # The lower two fit 32 bits together: 256 channels, 2^7 by 2^8 each, times 2^8.
    return high.astype(jnp.float32) * 65536.0 + ((middle << 8) + low).astype(jnp.float32)


def _undigit_rows(product, digits_ref, number):
    """Sums four digits, digit k of row r in row 4 r + k, by way of a part of the scratch."""
    rows, columns = product.shape[0] // 4, digits_ref.shape[-1]
    out = []
    for c in range(0, product.shape[1], columns):
        start = (number * product.shape[1] + c) // columns * 4 * rows
        digits_ref[start : start + 4 * rows] = product[:, c : c + columns]
        d0, d1, d2, d3 = (
            digits_ref[pl.ds(start + k, rows, stride=4), :].astype(jnp.float32) for k in range(4)
        )
        out.append(((d3 * 256 + d2) * 256 + d1) * 256 + d0)
    return jnp.concatenate(out, axis=1)


def _planes(packed, bits):
    """The packed numbers as bytes, plane by plane."""
    if bits == 8:
        return [packed]
    words = pltpu.bitcast(packed, jnp.int32)
    mask = jnp.int32({2: 0x03030303, 4: 0x0F0F0F0F}[bits])
    shifted = [
        words if j == 0 else jax.lax.shift_right_logical(words, jnp.int32(bits * j))
        for j in range(8 // bits)
    ]
    return [pltpu.bitcast(x & mask, jnp.int8) for x in shifted]


def _unpacked(packed, bits):
    return jnp.concatenate(_planes(packed, bits), axis=0)
