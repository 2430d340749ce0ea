"""Chat templates: messages to text, and which tokens the assistant wrote.

A checkpoint's template is a jinja program written by strangers. It runs in jinja's immutable
sandbox: it can read the messages and produce text, and reach nothing else.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np

from jaxllm.data.errors import DataError
from jaxllm.data.hf_tokenizer import HuggingFaceTokenizer, read_config, special_token
from jaxllm.data.tokenizers import Tokenizer

# Private-use characters that mark a `{% generation %}` block while rendering.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

Message = Mapping[str, Any]


class ChatError(DataError):
    """Messages or a template that cannot be rendered."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A compiled-on-use chat template.

    Attributes:
      source: the jinja source.
      special: special tokens that the template may name, such as {"bos_token": "<s>"}.
    """

    source: str
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """Text of a conversation.

        Args:
          messages: {"role": ..., "content": ...} each, oldest first.
          add_generation_prompt: end with the header of the assistant's next turn.
          **variables: further variables of the template, such as `tools` or `documents`.

        Raises:
          ChatError: no valid template, the template refuses the messages, or leaves the sandbox.
        """
        return self._render(messages, add_generation_prompt, variables, mark=False)

    def spans(
        self, messages: Sequence[Message], **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text of a conversation and the character spans that the assistant writes in it.

        A template with `{% generation %}` blocks says so itself. For any other one the spans
        come from rendering the conversation turn by turn: the assistant's part of a turn is what
        follows the generation prompt, up to and with the first end-of-text token.

        Raises:
          ChatError: as `render`; or the template rewrites earlier turns when later ones follow
            (some drop the reasoning of past turns), so that the spans are not defined.
        """
        text = self.render(messages, **variables)
        if "generation" in self.source and _has_generation_blocks(self.source):
            if _OPEN in text or _CLOSE in text:
                raise ChatError(f"messages: {_OPEN!r} and {_CLOSE!r} are used to mark spans")
            return _unmark(self._render(messages, False, variables, mark=True))
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            turn = self.render(messages[: i + 1], **variables)
            if not text.startswith(turn):
                raise ChatError(
                    f"message {i}: the template renders this turn differently when others follow, "
                    "so the assistant's tokens cannot be told apart; use a template with "
                    "{% generation %} blocks, or one conversation a turn"
                )
            prompt = self.render(messages[:i], True, **variables) if i else ""
            spans.append((_common_length(prompt, turn), self._end_of_turn(turn, prompt)))
        return text, spans

    def _end_of_turn(self, turn: str, prompt: str) -> int:
        eos = self.special.get("eos_token")
        at = turn.find(eos, _common_length(prompt, turn)) if eos else -1
        return at + len(eos) if at >= 0 else len(turn)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        mark: bool,
    ) -> str:
        _check(messages)
        given = {"tools": None, "documents": None, **self.special, **variables}
        try:
            template = _compile(self.source, mark)
            return template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **given
            )
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ChatError(f"chat template, line {error.lineno}: {error.message}") from error
        except jinja2.exceptions.SecurityError as error:
            raise ChatError(f"chat template leaves its sandbox: {error}") from error
        except jinja2.exceptions.TemplateError as error:
            raise ChatError(f"chat template: {error}") from error
        except Exception as error:  # whatever the template's own arithmetic raises
            raise ChatError(
                f"chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error


def load_chat_template(
    source: str | os.PathLike[str] | HuggingFaceTokenizer, name: str = "default"
) -> ChatTemplate:
    """The chat template of a checkpoint.

    Args:
      source: a checkpoint folder (`chat_template.jinja`, `additional_chat_templates/`, or the
        entry of `tokenizer_config.json`: one template or a list of named ones), or a tokenizer.
      name: which of several named templates, such as "tool_use".

    Raises:
      ChatError: there is no such template.
    """
    if isinstance(source, HuggingFaceTokenizer):
        config, where, found = source.config, "the tokenizer", {}
    else:
        folder = pathlib.Path(source)
        config, where, found = read_config(folder), str(folder), _template_files(folder)
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found.setdefault("default", entry)
    elif isinstance(entry, Sequence):
        for item in entry:
            found.setdefault(item["name"], item["template"])
    if name not in found:
        have = f"it has {', '.join(sorted(found))}" if found else "it has none"
        raise ChatError(f"{where} has no chat template {name!r}; {have}")
    special = {key: special_token(config, key) for key in _SPECIAL_NAMES}
    return ChatTemplate(found[name], {k: v for k, v in special.items() if v is not None})


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a conversation and which of them the assistant wrote.

    Returns:
      ids int32 [tokens] and weights float32 [tokens], 1 on the assistant's tokens and its
      end-of-turn token, 0 elsewhere. The template writes its own special tokens; none are added.
    """
    text, spans = template.spans(messages, **variables)
    ids, offsets = tokenizer.encode_with_offsets(text)
    starts = np.array([start for start, _ in offsets], np.int64)
    weights = np.zeros(len(ids), np.float32)
    for start, end in spans:
        weights[(starts >= start) & (starts < end)] = 1.0
    return np.asarray(ids, np.int32), weights


def _template_files(folder: pathlib.Path) -> dict[str, str]:
    found = {}
    if (folder / "chat_template.jinja").exists():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` around what the assistant writes."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        text = caller()
        return f"{_OPEN}{text}{_CLOSE}" if self.environment.globals.get("_mark") else text


@functools.lru_cache(maxsize=32)
def _compile(source: str, mark: bool) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now, _mark=mark)
    return environment.from_string(source)


def _has_generation_blocks(source: str) -> bool:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    try:
        tokens = list(environment.lex(source))
    except jinja2.exceptions.TemplateSyntaxError:
        return False  # rendering reports it with its line
    names = [(kind, value) for _, kind, value in tokens if kind != "whitespace"]
    return any(
        kind == "block_begin" and names[i + 1] == ("name", "generation")
        for i, (kind, _) in enumerate(names[:-1])
    )


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and &, which models have not seen.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ChatError(f"messages: a list was expected, not {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f'message {i}: expected {{"role": ..., "content": ...}}: {message!r}')


def _unmark(marked: str) -> tuple[str, list[tuple[int, int]]]:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = start = 0
    for part in marked.replace(_CLOSE, f"{_OPEN}{_CLOSE}").split(_OPEN):
        # After an opening mark comes a generated text, after a closing one the rest.
        if part.startswith(_CLOSE):
            spans.append((start, length))
            part = part[1:]
        start = length
        pieces.append(part)
        length += len(part)
    return "".join(pieces), spans


def _common_length(a: str, b: str) -> int:
    return len(os.path.commonprefix([a, b]))
