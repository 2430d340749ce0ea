"""Greedy and beam search of every family against transformers' generate."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live comparison needs the extra `parity` (torch)")
pytest.importorskip(
    "transformers", reason="live comparison needs the extra `parity` (transformers)"
)

from jaxllm.inference.beam import BeamConfig, beam_search  # noqa: E402
from jaxllm.inference.generate import generate  # noqa: E402
from jaxllm.models.hf import load_hf  # noqa: E402
from tests.parity.family_models import CASES, LENGTH_DEPENDENT, build  # noqa: E402

pytestmark = pytest.mark.parity

PROMPTS = [[5, 6, 7, 8, 9, 10], [11] * 3]
NEW = 7


# Where frequencies depend on the length, transformers changes them in mid-generation.
@pytest.mark.parametrize("name", sorted(set(CASES) - set(LENGTH_DEPENDENT)))
def test_families(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    config, params = load_hf(tmp_path)
    greedy = generate(config, params, PROMPTS, max_new_tokens=NEW, stop_tokens=[])
    beams = beam_search(
        config, params, PROMPTS, max_new_tokens=NEW, beams=BeamConfig(3), stop_tokens=[]
    )
    for prompt, ours, searched in zip(PROMPTS, greedy, beams, strict=True):
        ids = torch.tensor([prompt])
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": NEW,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        expected = model.generate(ids, **options)[0, len(prompt) :].tolist()
        assert ours == expected
        found = model.generate(
            ids,
            **options,
            num_beams=3,
            num_return_sequences=3,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [b.tokens for b in searched] == found.sequences[:, len(prompt) :].tolist()
        np.testing.assert_allclose(
            [b.score for b in searched], found.sequences_scores.numpy(), atol=1e-4
        )


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_when_beams_end(length_penalty, early_stopping, tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    config, params = load_hf(tmp_path)
    stops = [3, 17, 30]
    (ours, _) = beam_search(
        config,
        params,
        PROMPTS,
        max_new_tokens=12,
        beams=BeamConfig(4, length_penalty, early_stopping),
        stop_tokens=stops,
    )
    ids = torch.tensor(PROMPTS[:1])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=0,
        num_beams=4,
        num_return_sequences=4,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    np.testing.assert_allclose(
        [b.score for b in ours], found.sequences_scores.numpy()[: len(ours)], atol=1e-4
    )
    for beam, row in zip(ours, found.sequences[:, ids.shape[1] :].tolist(), strict=False):
        assert beam.tokens == row[: len(beam.tokens)]
