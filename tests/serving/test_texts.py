"""Pieces of a stream add up to the answer, and never show what a stop string cuts off."""

from __future__ import annotations

import pytest

from jaxllm.data.byte_tokenizer import ByteTokenizer
from jaxllm.inference.stopping import cut_text
from jaxllm.serving import texts


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("stops", [(), ("END",), ("ös",), ("ENx", "NEN", "x€y")])
def test_pieces_add_up(step, stops):
    text = "größer €uro ENEND x€y öst 💶 EN"
    decoder = texts.Decoder(ByteTokenizer())
    tokens = decoder.encode(text)
    whole = cut_text(decoder.decode(tokens), stops)
    pieces = texts.Pieces(decoder, stops)
    said = [pieces.fresh(tokens[:end]) for end in range(step, len(tokens) + 1, step)]
    assert "\ufffd" not in "".join(said) and whole.startswith("".join(said))
    assert "".join(said) + pieces.last(whole) == whole
    if not stops:
        assert sum(bool(piece) for piece in said) > 3
