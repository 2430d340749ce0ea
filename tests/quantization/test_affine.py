"""The quantiser against codes of KVTuner's own, its properties, and packing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.quantization import affine

GROUPS = {"pertoken": 32, "pertoken_g32": 32, "pertoken_g8": 8, "perchannel_g32": 32}


def test_codes_of_the_reference_implementation(golden):
    stored = golden("kvtuner/vanilla_quantizer")
    names = [name.removesuffix("_codes") for name in stored if name.endswith("_codes")]
    assert len(names) == 27
    for name in names:
        tensor, bits, *scheme, kind = name.split("_")
        scheme = "_".join(scheme)
        x = stored[tensor]
        x = x.swapaxes(2, 3) if scheme.startswith("perchannel") else x
        groups = x.reshape(-1, GROUPS[scheme])
        ours = affine.quantize(groups, int(bits), symmetric=kind == "sym")
        np.testing.assert_array_equal(ours.codes, stored[f"{name}_codes"], err_msg=name)
        np.testing.assert_allclose(ours.scale, stored[f"{name}_scale"], rtol=1e-6)
        if f"{name}_zero" in stored:
            np.testing.assert_array_equal(ours.zero, stored[f"{name}_zero"])
        if f"{name}_dq" in stored:
            theirs = stored[f"{name}_dq"]
            theirs = theirs.swapaxes(2, 3) if scheme.startswith("perchannel") else theirs
            theirs = theirs.reshape(groups.shape)
            np.testing.assert_allclose(ours.dequantize(), theirs, atol=1e-5)


@pytest.mark.parametrize("zero", ["int", "float"])
@given(
    bits=st.sampled_from([2, 4, 8]),
    offset=st.floats(-20, 20),
    spread=st.floats(1e-3, 10),
    seed=st.integers(0, 2**16),
)
def test_error_and_idempotence(zero, bits, offset, spread, seed):
    x = offset + spread * np.random.default_rng(seed).normal(size=(5, 16)).astype(np.float32)
    codes = affine.quantize(x, bits, zero=zero)
    rounded = codes.dequantize()
    # Numbers of magnitude 20 have a spacing of 2e-6 themselves.
    limit = codes.scale[:, None] * 0.5 + 2e-5
    assert (jnp.abs(rounded - x) <= limit * (1 + 1e-3)).all()
    if zero == "int":
        again = affine.quantize(rounded, bits, zero=zero).dequantize()
        np.testing.assert_allclose(again, rounded, atol=2e-5 * max(1, abs(offset)))


def test_constant_groups_wrong_widths_and_traced_bits():
    flat = affine.quantize(jnp.full((2, 8), 0.7), 2).dequantize()
    np.testing.assert_allclose(flat, 0.7, atol=1e-5)
    np.testing.assert_array_equal(affine.quantize(jnp.zeros((2, 8)), 2).dequantize(), 0)
    with pytest.raises(ValueError, match="bits=3 cannot be packed"):
        affine.pack(jnp.zeros((2, 8), jnp.int8), 3)
    with pytest.raises(ValueError, match="zero='half'"):
        affine.quantize(jnp.zeros((2, 8)), 4, zero="half")
    x = jax.random.normal(jax.random.key(0), (3, 8))
    widths = jnp.asarray([2, 4, 8])
    tried = jax.vmap(lambda bits: affine.quantize(x, bits).dequantize())(widths)
    for bits, found in zip((2, 4, 8), tried, strict=True):
        np.testing.assert_allclose(found, affine.quantize(x, bits).dequantize(), atol=1e-6)
    errors = jnp.abs(tried - x).mean((1, 2))
    assert errors[0] > errors[1] > errors[2]


@given(bits=st.sampled_from([2, 4, 8]), size=st.sampled_from([1, 4, 11]), seed=st.integers(0, 99))
def test_packing_round_trip(bits, size, seed):
    half = 2 ** (bits - 1)
    codes = np.random.default_rng(seed).integers(-half, half, (3, size)).astype(np.int8)
    packed = affine.pack(codes, bits)
    assert packed.shape == (3, -(-size * bits // 8))
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(affine.unpack(packed, bits, size), codes)
