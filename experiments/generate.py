"""Answers prompts with any checkpoint: one given, several examples, or a dialogue on a terminal."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections

from experiments import report
from experiments.errors import UsageError
from jaxllm.data import chat
from jaxllm.data.errors import DataError
from jaxllm.data.tokenizers import Tokenizer, load_tokenizer
from jaxllm.inference.generate import generate
from jaxllm.models import hf, parameters, quantized
from jaxllm.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model with all that turns text into text.

    Attributes:
      template: the chat template, or None to continue plain text.
    """

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    template: chat.ChatTemplate | None

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a dialogue, or without a template of its last message."""
        if self.template is None:
            ids = self.tokenizer.encode(messages[-1]["content"], add_special=True)
            # Some tokenizers end every text; a prompt goes on.
            if ids and len(ids) > 1 and ids[-1] == self.tokenizer.eos_id:
                ids = ids[:-1]
            return ids
        text = self.template.render(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text)

    def answer(
        self, dialogues: Sequence[Sequence[dict[str, str]]], options: ml_collections.ConfigDict
    ) -> list[tuple[str, int]]:
        """The reply to each dialogue, and its number of tokens."""
        replies = generate(
            self.config,
            self.params,
            [self.encode(messages) for messages in dialogues],
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            key=jax.random.key(options.seed),
            stop_tokens=self._stop_tokens(),
        )
        return [(self.tokenizer.decode(ids, skip_special=True), len(ids)) for ids in replies]

    def _stop_tokens(self) -> tuple[int, ...]:
        own = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *own)))


def load(options: ml_collections.ConfigDict) -> Engine:
    """Loads model, tokenizer and chat template as the config says.

    Raises:
      UsageError: an option, the checkpoint or its tokenizer cannot be used.
    """
    if options.chat not in ("auto", "always", "never"):
        raise UsageError(f"chat={options.chat!r}: expected auto, always or never.")
    if options.quantize_bits not in (0, 4, 8):
        raise UsageError(f"quantize_bits={options.quantize_bits}: expected 0, 4 or 8.")
    if options.model == "tiny":
        from experiments.tiny_model import get_tiny_model

        config, params, tokenizer = get_tiny_model()
        source: Any = tokenizer
    else:
        try:
            path = hf.resolve_model(options.model)
            config, params = hf.load_hf(path, dtype="float32")
            source = tokenizer = load_tokenizer(options.tokenizer or path)
            source = path if path.is_dir() else tokenizer
        except (hf.CheckpointError, hf.UnsupportedModelError, DataError) as error:
            raise UsageError(str(error)) from error
    template = None
    if options.chat != "never":
        try:
            template = chat.load_chat_template(source)
        except chat.ChatError as error:
            if options.chat == "always":
                raise UsageError(str(error)) from error
    if options.quantize_bits:
        params = quantized.quantize_params(params, options.quantize_bits, options.group_size)
    return Engine(config, params, tokenizer, template)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Prints the answers, and writes them to report.md."""
    start = time.perf_counter()
    engine = load(config)
    loading = time.perf_counter() - start
    count = parameters.count_params(engine.params)
    print(f"loaded {config.model} in {loading:.1f} s ({count / 1e6:.1f} M array elements)")
    answers = []
    if config.prompt is None and sys.stdin.isatty():
        answers = list(dialogue(engine, config))
    else:
        prompts = [config.prompt] if config.prompt is not None else list(config.examples)
        if "" in prompts:
            raise UsageError("prompt is empty; give some text.")
        start = time.perf_counter()
        replies = engine.answer([_opening(config, prompt) for prompt in prompts], config)
        seconds = time.perf_counter() - start
        for prompt, (reply, tokens) in zip(prompts, replies, strict=True):
            print(f"\n> {prompt}\n{reply}")
            answers.append({"prompt": prompt, "answer": reply, "tokens": tokens})
        print(f"\n{sum(n for _, n in replies)} tokens in {seconds:.1f} s, compilation included")
    page = report.Report(workdir, f"Answers of {config.model}")
    for entry in answers:
        page.code(f"> {entry['prompt']}\n{entry['answer']}")
    page.write()
    return {"model": config.model, "loading_seconds": loading, "answers": answers}


def dialogue(engine: Engine, options: ml_collections.ConfigDict) -> Iterator[dict[str, Any]]:
    """Asks for prompts until an empty line; a chat model remembers what was said."""
    print("Type a prompt; an empty line ends.")
    messages = _opening(options, None)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            return
        if not prompt.strip():
            return
        messages.append({"role": "user", "content": prompt})
        [(reply, tokens)] = engine.answer([messages], options)
        print(reply)
        messages.append({"role": "assistant", "content": reply})
        yield {"prompt": prompt, "answer": reply, "tokens": tokens}


def _opening(options: ml_collections.ConfigDict, prompt: str | None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": options.system}] if options.system else []
    return messages + ([{"role": "user", "content": prompt}] if prompt is not None else [])
