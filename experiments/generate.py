"""Answers prompts with any checkpoint: one given, several examples, or a dialogue on a terminal."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from experiments import report
from experiments.errors import UsageError
from jaxllm.compilation.analysis import Work
from jaxllm.data import chat
from jaxllm.data.errors import DataError
from jaxllm.data.tokenizers import Tokenizer, load_tokenizer
from jaxllm.inference.generate import generate, lower
from jaxllm.models import hf, parameters, presets, quantized
from jaxllm.models.config import ModelConfig
from jaxllm.training import flops, sharding


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


def lower_steps(
    config: ml_collections.ConfigDict, mesh: Mesh | None = None
) -> dict[str, jax.stages.Lowered]:
    """Lowers prefill and decoding of `config.compiled` from shapes alone: nothing is allocated.

    Raises:
      UsageError: an unknown preset.
    """
    model, options = _compiled_model(config), config.compiled

    params = parameters.abstract_params(model)
    if config.quantize_bits:
        quantize = functools.partial(
            quantized.quantize_params, bits=config.quantize_bits, group_size=config.group_size
        )
        params = jax.eval_shape(quantize, params)
    if mesh is not None:
        placed = sharding.named_shardings(params, parameters.logical_axes(model, params), mesh)
        params = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params, placed
        )
    with sharding.use(mesh):
        return lower(
            model,
            params,
            batch_size=options.batch_size,
            prompt_length=options.prompt_length,
            max_new_tokens=options.max_new_tokens,
            prefill_chunk=options.prefill_chunk,
        )


def step_work(config: ml_collections.ConfigDict) -> dict[str, Work]:
    """What each of `lower_steps` is for; of decoding one turn of the loop, at the full length."""
    model, options = _compiled_model(config), config.compiled
    rows, length = options.batch_size, options.prompt_length
    full = length + options.max_new_tokens
    count = parameters.count_params(parameters.abstract_params(model))
    # Forward only: a third of training. The newest token sees all others, on average a token of a
    # row of twice the length does.
    return {
        "prefill": Work(count, rows * length, flops.flops_per_token(model, length) / 3, rows=rows),
        "decode": Work(count, rows, flops.flops_per_token(model, 2 * full) / 3, rows=rows),
    }


def _compiled_model(config: ml_collections.ConfigDict) -> ModelConfig:
    try:
        model = presets.preset(config.compiled.preset)
    except KeyError as error:
        raise UsageError(f"compiled.preset: {error.args[0]}") from error
    dtype = config.compiled.dtype
    length = config.compiled.prompt_length + config.compiled.max_new_tokens
    return model.replace(
        param_dtype=dtype,
        compute_dtype=dtype,
        remat="none",
        max_positions=max(model.max_positions, length),
    )


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
