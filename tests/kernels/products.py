"""The smallest operation that the frame can carry: a matrix product with one Pallas body."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import dispatch


def reference(x, w):
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def kernel(x, w, interpret=False):
    def body(x_ref, w_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    return pl.pallas_call(body, out_shape=shape, name="product", interpret=interpret)(x, w)


def product(x, w, *, implementation=None, partition=None, interpret=False):
    """x @ w for widths that are multiples of 8; no kernel for GPUs."""

    def kernels(x, w):
        tpu = functools.partial(kernel, interpret=interpret)
        if x.shape[1] % 8:
            tpu = dispatch.Unsupported(f"k={x.shape[1]} is no multiple of 8")
        return dispatch.Kernels(tpu=tpu, gpu=dispatch.Unsupported("not written"))

    return dispatch.call(
        "product",
        x,
        w,
        xla=reference,
        kernels=kernels,
        rule="m k, k n -> m n",
        summed=("k",),
        implementation=implementation,
        partition=partition,
    )
