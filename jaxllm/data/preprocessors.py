"""From records to token sequences, as plain functions `example -> example | None`.

A preprocessor takes one record (a dict of Python values) and returns a new one, or None to drop
it. The last one of a chain returns token sequences:

    {"tokens": int32 [n], ("weights": float32 [n]), ("bytes": int)}     one document
    {"chosen": int32 [n], "chosen_weights": float32 [n], "rejected": ...}    a pair

`weights[i]` is the loss weight of predicting token i; without it every token weighs 1. `bytes`
is the size in UTF-8 of the text that is predicted, for bits per byte. The names are the class
attribute `parts`, dtype and rank of everything `features`. No TensorFlow is needed;
`jaxllm.data.tasks.to_seqio` lifts these functions for seqio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.data.chat import ChatTemplate, encode_chat
from jaxllm.data.errors import DataError
from jaxllm.data.tokenizers import Tokenizer

Example = dict[str, Any]
Preprocessor = Callable[[Example], Example | None]


@dataclasses.dataclass(frozen=True)
class LanguageModeling:
    """Every token of a text is predicted from those before it.

    Attributes:
      tokenizer: its own special tokens (`add_special`) are put around the text.
      field: name of the text.
      add_bos: put the begin token in front where the tokenizer does not by itself.
      add_eos: end with the end token, as the final target of the document.
    """

    tokenizer: Tokenizer
    field: str = "text"
    add_bos: bool = False
    add_eos: bool = True

    parts = ("tokens",)
    features = {"tokens": ("int32", 1), "bytes": ("int64", 0)}

    def __post_init__(self):
        _need(self.tokenizer, "bos_id", self.add_bos)
        _need(self.tokenizer, "eos_id", self.add_eos)

    def __call__(self, example: Example) -> Example:
        return self.many([example])[0]

    def many(self, examples: Sequence[Example]) -> list[Example | None]:
        """The same for several records, tokenized together."""
        texts = [_text(example, self.field) for example in examples]
        results: list[Example | None] = []
        for text, ids in zip(texts, self.tokenizer.encode_batch(texts, True), strict=True):
            if text:
                if self.add_bos and ids[:1] != [self.tokenizer.bos_id]:
                    ids = [self.tokenizer.bos_id, *ids]
                if self.add_eos and ids[-1:] != [self.tokenizer.eos_id]:
                    ids = [*ids, self.tokenizer.eos_id]
            tokens = np.asarray(ids if text else [], np.int32)
            results.append({"tokens": tokens, "bytes": len(text.encode("utf-8"))})
        return results


@dataclasses.dataclass(frozen=True)
class PromptResponse:
    """Supervised fine-tuning: only the response is predicted.

    Prompt and response are tokenized apart, so that training sees the prompt's tokens as
    generation does.

    Attributes:
      prompt, response: format strings over the record's fields, such as
        "Question: {question}\\nAnswer: ".
      template: a chat template; the two texts become a user's and an assistant's message.
      system: system message for the template.
    """

    tokenizer: Tokenizer
    prompt: str = "{prompt}"
    response: str = "{response}"
    template: ChatTemplate | None = None
    system: str | None = None

    parts = ("tokens",)
    features = {"tokens": ("int32", 1), "weights": ("float32", 1), "bytes": ("int64", 0)}

    def __post_init__(self):
        _need(self.tokenizer, "eos_id", self.template is None)

    def __call__(self, example: Example) -> Example | None:
        prompt, response = _format(self.prompt, example), _format(self.response, example)
        if not response:
            return None
        if self.template is None:
            tokens, weights = _joined(self.tokenizer, prompt, response)
        else:
            messages = [{"role": "system", "content": self.system}] if self.system else []
            messages += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
            tokens, weights = encode_chat(self.template, self.tokenizer, messages)
        return {"tokens": tokens, "weights": weights, "bytes": len(response.encode("utf-8"))}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Supervised fine-tuning on dialogues: the assistant's turns are predicted.

    Attributes:
      field: name of the list of messages, {"role", "content"} or ShareGPT's {"from", "value"}.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    field: str = "messages"

    parts = ("tokens",)
    features = {"tokens": ("int32", 1), "weights": ("float32", 1), "bytes": ("int64", 0)}

    def __call__(self, example: Example) -> Example | None:
        messages = normalize_messages(_field(example, self.field), self.field)
        tokens, weights = encode_chat(self.template, self.tokenizer, messages)
        if not weights.any():
            return None
        texts = (str(m["content"]) for m in messages if m["role"] == "assistant")
        size = sum(len(text.encode("utf-8")) for text in texts)
        return {"tokens": tokens, "weights": weights, "bytes": size}


@dataclasses.dataclass(frozen=True)
class Preference:
    """A better and a worse answer to one prompt; weights mark the two answers.

    Three layouts are read:
      * `chosen` and `rejected` are texts and `prompt` is a format string;
      * they are texts and `prompt` is None: whole dialogues in the form of HH-RLHF, whose prompt
        is their longest common beginning that ends in an assistant's heading;
      * they are messages, one or a list, after those of the field `history` if given: rendered
        by `template`; the last assistant turn is the answer.

    Attributes:
      heading: what an assistant's turn begins with in the second layout.
    """

    tokenizer: Tokenizer
    prompt: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    history: str | None = None
    template: ChatTemplate | None = None
    heading: str = "\n\nAssistant:"

    parts = ("chosen", "rejected")
    features = {
        "chosen": ("int32", 1),
        "chosen_weights": ("float32", 1),
        "rejected": ("int32", 1),
        "rejected_weights": ("float32", 1),
    }

    def __call__(self, example: Example) -> Example | None:
        values = _field(example, self.chosen), _field(example, self.rejected)
        if values[0] == values[1]:
            return None
        if all(isinstance(value, str) for value in values):
            return self._from_texts(example, *values)
        return self._from_messages(example, *values)

    def _from_texts(self, example: Example, chosen: str, rejected: str) -> Example:
        if self.prompt is not None:
            prompt = _format(self.prompt, example)
        else:
            prompt = _common_prompt(chosen, rejected, self.heading)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        return _pair(
            _joined(self.tokenizer, prompt, chosen), _joined(self.tokenizer, prompt, rejected)
        )

    def _from_messages(self, example: Example, chosen: Any, rejected: Any) -> Example:
        if self.template is None:
            raise DataError(
                f"the fields {self.chosen!r} and {self.rejected!r} hold messages; a chat template "
                "is needed to write them"
            )
        before = [] if self.history is None else _field(example, self.history)
        before = normalize_messages(before, str(self.history))
        sides = []
        for name, value in ((self.chosen, chosen), (self.rejected, rejected)):
            turns = [value] if isinstance(value, Mapping) else value
            messages = [*before, *normalize_messages(turns, name)]
            if messages[-1]["role"] != "assistant":
                raise DataError(f"the field {name!r} does not end with the assistant's message")
            sides.append(_last_answer(*encode_chat(self.template, self.tokenizer, messages)))
        return _pair(*sides)


@dataclasses.dataclass(frozen=True)
class Keep:
    """Keeps the records whose field is one of `values`, or with `invert` the others."""

    field: str
    values: tuple[Any, ...]
    invert: bool = False

    def __call__(self, example: Example) -> Example | None:
        return example if (_field(example, self.field) in self.values) != self.invert else None


def forget_retain(field: str, forget: Sequence[Any]) -> dict[str, Keep]:
    """Two filters that divide one source: records to unlearn, and all others.

    Put each in front of the same preprocessor for the splits "forget" and "retain", and serve the
    two with `jaxllm.data.rows.ZippedRows`.
    """
    values = tuple(forget)
    return {"forget": Keep(field, values), "retain": Keep(field, values, invert=True)}


PREPROCESSORS: dict[str, Callable[..., Preprocessor]] = {
    "language_modeling": LanguageModeling,
    "prompt_response": PromptResponse,
    "conversation": Conversation,
    "preference": Preference,
}


def make_preprocessor(
    kind: str,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    **options: Any,
) -> Preprocessor:
    """A preprocessor from a config's values.

    Args:
      kind: a key of `PREPROCESSORS`.
      **options: fields of that class.

    Raises:
      DataError: an unknown kind or option, or the kind needs a template.
    """
    if kind not in PREPROCESSORS:
        raise DataError(f"preprocessor {kind!r} is unknown; expected {', '.join(PREPROCESSORS)}")
    cls = PREPROCESSORS[kind]
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in options:
        if name not in names - {"tokenizer", "template"}:
            expected = ", ".join(sorted(names - {"tokenizer", "template"}))
            raise DataError(f"{kind} has no option {name!r}; expected {expected}")
    if "template" in names and template is not None:
        options["template"] = template
    if kind == "conversation" and template is None:
        raise DataError("conversation needs a chat template")
    return cls(tokenizer=tokenizer, **options)


def normalize_messages(value: Any, field: str = "messages") -> list[dict[str, Any]]:
    """Messages as {"role", "content"}; ShareGPT's {"from": "human" | "gpt", "value"} is read too.

    Raises:
      DataError: not a list of such messages.
    """
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise DataError(f"the field {field!r} holds {type(value).__name__}, not a list of messages")
    messages = []
    for i, message in enumerate(value):
        if isinstance(message, Mapping) and "role" in message:
            messages.append(dict(message))
        elif isinstance(message, Mapping) and "from" in message and "value" in message:
            role = _SHARE_GPT.get(message["from"], message["from"])
            messages.append({"role": role, "content": message["value"]})
        else:
            raise DataError(f"{field}[{i}] is no message with role and content: {message!r}")
    return messages


_SHARE_GPT = {"human": "user", "gpt": "assistant"}


def weights_name(part: str) -> str:
    """Name of the weights that belong to a part of an example."""
    return "weights" if part == "tokens" else f"{part}_weights"


def _joined(tokenizer: Tokenizer, prompt: str, response: str) -> tuple[np.ndarray, np.ndarray]:
    plain, before = tokenizer.encode(prompt), tokenizer.encode(prompt, add_special=True)
    if before[-len(plain) - 1 :] == [*plain, tokenizer.eos_id] != [tokenizer.bos_id]:
        before = before[:-1]  # a tokenizer that ends every text would end the prompt too
    after = [*tokenizer.encode(response), tokenizer.eos_id]
    weights = np.repeat(np.array([0, 1], np.float32), [len(before), len(after)])
    return np.asarray([*before, *after], np.int32), weights


def _pair(
    chosen: tuple[np.ndarray, np.ndarray], rejected: tuple[np.ndarray, np.ndarray]
) -> Example:
    return {
        "chosen": chosen[0],
        "chosen_weights": chosen[1],
        "rejected": rejected[0],
        "rejected_weights": rejected[1],
    }


def _last_answer(tokens: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    zeros = np.flatnonzero(weights[: weights.nonzero()[0].max(initial=-1) + 1] == 0)
    weights[: zeros.max(initial=-1) + 1] = 0
    return tokens, weights


def _common_prompt(chosen: str, rejected: str, heading: str) -> str:
    n = 0
    while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
        n += 1
    at = chosen.rfind(heading, 0, n)
    if at < 0:
        raise DataError(f"the two dialogues share no beginning that ends in {heading!r}")
    return chosen[: at + len(heading)]


def _field(example: Mapping[str, Any], name: str) -> Any:
    if name not in example:
        raise DataError(f"the field {name!r} is missing; it has {', '.join(sorted(example))}")
    return example[name]


def _text(example: Mapping[str, Any], name: str) -> str:
    value = _field(example, name)
    if not isinstance(value, str):
        raise DataError(f"the field {name!r} holds {type(value).__name__}, not text")
    return value


def _format(form: str, example: Mapping[str, Any]) -> str:
    try:
        return form.format_map(example)
    except KeyError as error:
        have = ", ".join(sorted(example))
        raise DataError(f"the field {error.args[0]!r} is missing; it has {have}") from error


def _need(tokenizer: Tokenizer, name: str, needed: bool) -> None:
    if needed and getattr(tokenizer, name) is None:
        raise DataError(f"the tokenizer has no {name}, which this preprocessor needs")
