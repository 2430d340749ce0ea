"""Training a small byte-level BPE tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxllm.data.errors import TokenizerError
from jaxllm.data.hf_tokenizer import HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    special_tokens: Iterable[str] = (),
    min_frequency: int = 2,
    individual_digits: bool = True,
    progress: bool = False,
) -> HuggingFaceTokenizer:
    """Trains byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2): every text is encodable.

    The same texts in the same order give the same tokenizer, on any number of threads.

    Args:
      texts: the training texts.
      vocab_size: number of tokens: padding (0), end of text (1, also the beginning), the further
        special tokens, 256 bytes, then merges. Fewer come out where the texts offer fewer merges.
      special_tokens: contents of further special tokens, from id 2 on.
      min_frequency: a pair seen less often is not merged.
      individual_digits: split numbers into digits, as Llama and SmolLM2 do.
      progress: show the library's progress bar.

    Raises:
      TokenizerError: `vocab_size` leaves no room for the bytes, or there is no text.
    """
    special = [PADDING, END_OF_TEXT, *special_tokens]
    if vocab_size < len(special) + 256:
        raise TokenizerError(
            f"vocab_size is {vocab_size}; {len(special)} special tokens and 256 bytes need "
            f"at least {len(special) + 256}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if individual_digits
        else byte_level
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    seen = 0

    def counted() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            yield text

    backend.train_from_iterator(counted(), trainer)
    if not seen:
        raise TokenizerError("no text to train a tokenizer on")
    config = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING}
    # Through JSON, so that the definition is the one that a saved file gives.
    definition = json.dumps(json.loads(backend.to_str()))
    return HuggingFaceTokenizer(definition, config, source="trained BPE")
