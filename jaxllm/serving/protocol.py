"""What clients send, checked; a wrong field is refused with its name and what was expected."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.inference.sampling import SamplingConfig

MAX_CHOICES = 128  # Of one prompt.
MAX_STOPS = 16
MAX_LOGPROBS = 20


class ApiError(Exception):
    """A request that is refused.

    Attributes:
      status: of HTTP.
      param: the field at fault.
      code: for programs, such as "model_not_found".
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """As OpenAI reports errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclasses.dataclass(frozen=True)
class Options:
    """What completions and chat have in common.

    Attributes:
      model: None = the one that is served.
      max_tokens: None = the endpoint's default.
      n: answers to each prompt.
      seed: None = another one each time.
      stop: strings that end the answer.
      include_usage: whether a stream ends with the number of tokens.
    """

    model: str | None
    max_tokens: int | None
    n: int
    sampling: SamplingConfig
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


@dataclasses.dataclass(frozen=True)
class CompletionsBody:
    """Body of /v1/completions.

    Attributes:
      prompts: texts or token ids.
      echo: whether answers begin with the prompt.
      logprobs: how many of the most likely tokens are told at every place; None = nothing.
    """

    options: Options
    prompts: list[str] | list[list[int]]
    echo: bool
    logprobs: int | None


@dataclasses.dataclass(frozen=True)
class ChatBody:
    """Body of /v1/chat/completions; the contents of messages are texts."""

    options: Options
    messages: list[dict[str, Any]]


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
      ApiError: it is none.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_shown(body)}.")
    return body


def parse_completions(body: Mapping[str, Any]) -> CompletionsBody:
    """Checks a body of /v1/completions.

    Raises:
      ApiError: 400 with the field at fault.
    """
    fields = _Fields(body)
    prompt = fields.take("prompt", lambda value: value is not None, _PROMPT, required=True)
    parsed = CompletionsBody(
        prompts=_prompts(prompt),
        echo=fields.flag("echo"),
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
        options=_options(fields),
    )
    fields.take("best_of", lambda value: value == parsed.options.n, "the value of n")
    fields.take("suffix", lambda value: value == "", "nothing: it is not supported")
    fields.finish()
    if parsed.logprobs is not None and parsed.options.stream:
        raise ApiError(400, "logprobs: not available with stream=true.", "logprobs")
    return parsed


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    """Checks a body of /v1/chat/completions.

    Raises:
      ApiError: 400 with the field at fault.
    """
    fields = _Fields(body)
    expected = "a list of messages, not empty"
    messages = fields.take(
        "messages", lambda value: isinstance(value, list) and value, expected, required=True
    )
    newer = fields.integer("max_completion_tokens", 0)
    options = _options(fields)
    if options.max_tokens is None:
        options = dataclasses.replace(options, max_tokens=newer)
    for name in ("logprobs", "tools", "functions"):
        fields.take(name, lambda value: not value, "nothing: it is not supported")
    fields.take("top_logprobs", lambda value: value == 0, "0: others are not supported")
    fields.take("tool_choice", lambda value: value in ("none", "auto"), "none: there are no tools")
    fields.take(
        "response_format", lambda value: value == {"type": "text"}, 'nothing, or {"type": "text"}'
    )
    fields.finish()
    return ChatBody(options, [_message(i, message) for i, message in enumerate(messages)])


def _options(fields: _Fields) -> Options:
    """Takes the fields that both endpoints have."""
    temperature = fields.number("temperature", 0, 100)
    top_p = fields.number("top_p", 0, 1)
    top_k = fields.integer("top_k", -1)
    if top_p == 0:
        raise ApiError(400, "top_p: expected a number above 0 and up to 1, got 0.", "top_p")
    penalty = fields.number("repetition_penalty", 0.01, 100)
    sampling = SamplingConfig(
        temperature=1.0 if temperature is None else temperature,
        # 0 and -1 are ways to say "all", as is a top_p of 1.
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=None if top_p == 1 else top_p,
        min_p=fields.number("min_p", 0, 1),
        repetition_penalty=1.0 if penalty is None else penalty,
    )
    stop = fields.take("stop", _is_stop, f"a string or up to {MAX_STOPS} strings, none empty")
    stop = () if stop is None else stop
    stream_options = fields.take("stream_options", lambda v: isinstance(v, dict), "an object") or {}
    for name in ("frequency_penalty", "presence_penalty"):
        fields.take(name, lambda value: value == 0, "0: others are not supported")
    fields.take("logit_bias", lambda value: value == {}, "nothing: it is not supported")
    # Said by clients, and without effect here.
    for name in ("user", "store", "metadata", "service_tier"):
        fields.take(name, lambda value: True, "")
    return Options(
        model=fields.take("model", lambda value: isinstance(value, str), "a string"),
        max_tokens=fields.integer("max_tokens", 0),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        sampling=sampling,
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=fields.flag("stream"),
        include_usage=stream_options.get("include_usage") is True,
    )


class _Fields:
    """The fields of a body, each taken once; null is the same as absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)
        self._known: list[str] = []

    def take(
        self, name: str, holds: Callable[[Any], Any], expected: str, required: bool = False
    ) -> Any:
        """A field of which `holds` is true, or None."""
        self._known.append(name)
        value = self._left.pop(name, None)
        if value is None and required:
            raise ApiError(400, f"{name}: expected {expected}, but it is missing.", name)
        if value is not None and not holds(value):
            raise ApiError(400, f"{name}: expected {expected}, got {_shown(value)}.", name)
        return value

    def flag(self, name: str) -> bool:
        """true or false."""
        return self.take(name, lambda value: isinstance(value, bool), "true or false") or False

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer of low .. high."""

        def holds(value: Any) -> bool:
            return _is_integer(value) and low <= value and (high is None or value <= high)

        end = "at least {}" if high is None else "of {} to {}"
        return self.take(name, holds, f"an integer {end.format(low, high)}")

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number of low .. high."""

        def holds(value: Any) -> bool:
            real = isinstance(value, int | float) and not isinstance(value, bool)
            return real and low <= value <= high

        value = self.take(name, holds, f"a number of {low} to {high}")
        return None if value is None else float(value)

    def finish(self) -> None:
        """Refuses what was not taken."""
        if self._left:
            name = min(self._left)
            known = ", ".join(sorted(self._known))
            raise ApiError(400, f"{name}: unknown field; expected some of {known}.", name)


_PROMPT = "a string, a list of strings, token ids, or a list of lists of token ids"


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(part, str) for part in prompt) or all(map(_is_ids, prompt)):
            return prompt
    raise ApiError(400, f"prompt: expected {_PROMPT}, got {_shown(prompt)}.", "prompt")


def _message(index: int, message: Any) -> dict[str, Any]:
    """A message with its content as one text."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(
            400, f'{where}: expected {{"role": ..., "content": ...}}, got {_shown(message)}.', where
        )
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        expected = 'a string or a list of {"type": "text", "text": ...}'
        raise ApiError(400, f"{where}.content: expected {expected}, got {_shown(content)}.", where)
    return message | {"content": content}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_integer, value))


def _is_stop(value: Any) -> bool:
    stops: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        return False
    return all(isinstance(stop, str) and stop for stop in stops)


def _shown(value: Any) -> str:
    """A value as JSON, cut."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
