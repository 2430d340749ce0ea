"""From tokens to what clients read: answers, pieces of a stream, log probabilities, usage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxllm.data.tokenizers import Tokenizer
from jaxllm.inference.engine import Request
from jaxllm.inference.engine_scores import TokenScores
from jaxllm.inference.stopping import cut_text


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A tokenizer without special tokens in texts."""

    tokenizer: Tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(ids, skip_special=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that goes on, with what the checkpoint puts before it."""
        ids = self.tokenizer.encode(text, add_special=True)
        # Some tokenizers end every text; a prompt goes on.
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_id else ids

    def token(self, token_id: int) -> str:
        """The text of one token, special ones by their name; a part of a character by its id."""
        text = self.tokenizer.decode([token_id])
        return f"token_id:{token_id}" if "\ufffd" in text else text


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer.

    Attributes:
      prompt, tokens: ids, without the stop token.
      text: of the answer.
      finish: "stop" or "length".
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    text: str
    finish: str


class Pieces:
    """Cuts the growing text of one answer into pieces that can be sent.

    What may be the beginning of a stop string, or of a character of several tokens, is held back.
    """

    def __init__(self, decoder: Decoder, stop_strings: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stop_strings
        self._sent = ""

    def fresh(self, tokens: Sequence[int]) -> str:
        """What is new and certain in the text of all tokens so far."""
        text = cut_text(self._decoder.decode(tokens), self._stops)
        text = text.rstrip("\ufffd")
        text = text[: len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)]
        return self._rest(text) if text.startswith(self._sent) else ""

    def last(self, text: str) -> str:
        """What is left to send of the whole answer."""
        return self._rest(text)

    def _rest(self, text: str) -> str:
        piece = text[len(self._sent) :]
        self._sent = text
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that is a beginning of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def probe(decoder: Decoder, request: Request, scores: TokenScores) -> Choice:
    """The answer of at most one greedy token, from the scores of the prompt.

    A stop token counts as a token here: whoever reads log probabilities drops the last one.
    """
    tokens = [int(scores.top_ids[-1, 0])][: request.max_new_tokens]
    stopped = bool(tokens) and tokens[0] in (request.stop_tokens or ())
    return Choice(request.prompt, tokens, decoder.decode(tokens), "stop" if stopped else "length")


def logprobs(
    decoder: Decoder, choice: Choice, scores: TokenScores, top: int, echo: bool
) -> dict[str, Any]:
    """The `logprobs` object of a completion: of the answer, with `echo` of the prompt as well.

    Args:
      decoder: names the tokens.
      choice: the answer.
      scores: of the prompt, or of prompt and answer.
      top: likeliest tokens that are told.
      echo: whether the prompt is part of it; nothing is known of its first token.
    """
    ids = [*choice.prompt, *choice.tokens]
    known: list[float | None] = [None, *map(float, scores.log_probs)]
    if len(known) < len(ids):  # A probe's token is the likeliest one.
        known.append(float(scores.top_log_probs[-1, 0]))
    names = [decoder.token(token) for token in ids]
    likely: list[dict[str, float] | None] = [None]
    for name, log_prob, top_ids, values in zip(
        names[1:], known[1:], scores.top_ids, scores.top_log_probs, strict=False
    ):
        # Least likely first: of several tokens with one text the likeliest is told.
        pairs = [(decoder.token(int(i)), float(v)) for i, v in zip(top_ids, values, strict=True)]
        found = dict(reversed(pairs[:top]))
        if top:
            found.setdefault(name, log_prob)
        likely.append(found)
    start = 0 if echo else len(choice.prompt)
    offsets, place = [], 0
    for name in names[start:]:
        offsets.append(place)
        place += len(name)
    return {
        "tokens": names[start:],
        "token_logprobs": known[start:],
        "top_logprobs": likely[start:] if top else None,
        "text_offset": offsets,
    }


def usage(choices: Sequence[Choice], n: int) -> dict[str, int]:
    """Numbers of tokens; the prompt of several answers counts once."""
    prompt = sum(len(choice.prompt) for choice in choices[::n])
    answers = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
    }
