"""A small server of the OpenAI protocol: completions, chat, models and health, over one engine.

    app = create_app(ServedModel("tiny", config, params, tokenizer), Limits(num_slots=8))

It answers what `openai` clients and lm-evaluation-harness (`local-completions`, with log
probabilities of prompts, and `local-chat-completions`) ask. A client that hangs up frees its slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxllm.data.chat import ChatTemplate
from jaxllm.data.errors import DataError
from jaxllm.data.tokenizers import Tokenizer
from jaxllm.inference import engine_scores
from jaxllm.inference.engine import Engine, Request
from jaxllm.models.config import ModelConfig
from jaxllm.serving import connection, protocol, texts
from jaxllm.serving.protocol import ApiError, ChatBody, CompletionsBody, Options
from jaxllm.serving.worker import Answer, Worker

DEFAULT_MAX_TOKENS = 16  # Of /v1/completions, as OpenAI has it; chat takes what is left.


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model under a name.

    Attributes:
      template: of chat; None = plain completions only.
      stop_tokens: end an answer; None = the config's and the tokenizer's end of sequence.
    """

    name: str
    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    stop_tokens: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the server takes.

    Attributes:
      num_slots: sequences that run at once.
      max_length: tokens of a prompt and its answer.
      max_open: sequences that run or wait; what comes beyond them is told to come later (429).
      max_body: bytes of a request (413).
    """

    num_slots: int = 8
    max_length: int = 2048
    max_open: int = 512
    max_body: int = 4 * 2**20


def create_app(model: ServedModel, limits: Limits) -> Starlette:
    """The ASGI application; its engine starts and stops with its lifespan."""
    server = Server(model, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        server.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(server.worker.stop)

    app = Starlette(
        routes=[
            Route("/health", server.health),
            Route("/v1/models", server.models),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _refusal,
            HTTPException: _http_error,
            Exception: _failure,
        },
        lifespan=lifespan,
    )
    app.state.server = server
    return app


async def _refusal(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code)


async def _failure(_: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"internal error: {type(error).__name__}.").body(), 500)


class Server:
    """The handlers of one model, and the sequences that are open."""

    def __init__(self, model: ServedModel, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        stops = model.stop_tokens
        if stops is None:
            own = () if model.tokenizer.eos_id is None else (model.tokenizer.eos_id,)
            stops = tuple(dict.fromkeys((*model.config.eos_token_ids, *own)))
        self.stop_tokens = stops
        self.decoder = texts.Decoder(model.tokenizer)
        self.engine = Engine(
            model.config,
            model.params,
            num_slots=limits.num_slots,
            max_length=limits.max_length,
            tokenizer=self.decoder,
        )
        self.worker = Worker(self.engine)
        self.open = 0
        self._created = int(time.time())

    async def health(self, _: HttpRequest) -> Response:
        """Whether requests are answered, and how many there are."""
        alive = self.worker.alive
        status = {
            "status": "ok" if alive else "stopped",
            "model": self.model.name,
            "slots": self.limits.num_slots,
            "running": self.engine.num_running,
            "open": self.open,
        }
        return JSONResponse(status, 200 if alive else 503)

    async def models(self, _: HttpRequest) -> Response:
        """The one model."""
        card = {
            "id": self.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxllm",
            "max_model_len": self.limits.max_length,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def completions(self, request: HttpRequest) -> Response:
        """/v1/completions."""
        data = await connection.read_body(request, self.limits.max_body)
        body = protocol.parse_completions(protocol.parse_json(data))
        self._check_model(body.options)
        prompts = await self._encode(body.prompts)
        if body.options.max_tokens is None:
            body = dataclasses.replace(
                body, options=dataclasses.replace(body.options, max_tokens=DEFAULT_MAX_TOKENS)
            )
        requests = self._requests(prompts, body.options)
        if body.options.stream:
            echoes = [self.decoder.decode(r.prompt) if body.echo else "" for r in requests]
            return self._event_stream(requests, body.options, echoes)
        with self._admitted(len(requests)):
            return await connection.unless_gone(request, self._complete(requests, body))

    async def chat(self, request: HttpRequest) -> Response:
        """/v1/chat/completions."""
        data = await connection.read_body(request, self.limits.max_body)
        body = protocol.parse_chat(protocol.parse_json(data))
        self._check_model(body.options)
        prompt = await asyncio.to_thread(self._render, body)
        if body.options.max_tokens is None:
            left = max(1, self.limits.max_length - len(prompt))
            body = dataclasses.replace(
                body, options=dataclasses.replace(body.options, max_tokens=left)
            )
        requests = self._requests([prompt], body.options)
        if body.options.stream:
            return self._event_stream(requests, body.options, None)
        with self._admitted(len(requests)):
            return await connection.unless_gone(request, self._chat(requests, body))

    def _check_model(self, options: Options) -> None:
        if options.model not in (None, self.model.name):
            raise ApiError(
                404,
                f"model: {options.model!r} is not served here, only {self.model.name!r}.",
                "model",
                "model_not_found",
            )

    async def _encode(self, prompts: list[str] | list[list[int]]) -> list[list[int]]:
        try:
            return await asyncio.to_thread(
                lambda: [p if isinstance(p, list) else self.decoder.encode(p) for p in prompts]
            )
        except DataError as error:
            raise ApiError(400, f"prompt: {error}.", "prompt") from error

    def _render(self, body: ChatBody) -> list[int]:
        if self.model.template is None:
            raise ApiError(
                400, f"{self.model.name} has no chat template: use /v1/completions.", "messages"
            )
        try:
            text = self.model.template.render(body.messages, add_generation_prompt=True)
            return self.model.tokenizer.encode(text)
        except DataError as error:
            raise ApiError(400, f"messages: {error}.", "messages") from error

    def _requests(self, prompts: Sequence[list[int]], options: Options) -> list[Request]:
        """The sequences to run, n of each prompt in turn, checked."""
        seed = secrets.randbits(62) if options.seed is None else options.seed
        count = len(prompts) * options.n
        if count > self.limits.max_open:
            raise ApiError(
                400, f"prompt: {count} answers are asked for, at most {self.limits.max_open} fit."
            )
        requests = []
        for index, prompt in enumerate(prompts):
            requests += [
                Request(
                    prompt=prompt,
                    max_new_tokens=options.max_tokens or 0,
                    sampling=options.sampling,
                    key=_key(seed, index, number) if options.sampling.temperature > 0 else None,
                    stop_tokens=self.stop_tokens,
                    stop_strings=options.stop,
                )
                for number in range(options.n)
            ]
        for request in requests[:: options.n]:
            try:
                self.engine.check(request)
            except ValueError as error:
                raise ApiError(400, str(error), "prompt") from error
        return requests

    @contextlib.contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        """Counts sequences as open, if there is room for them."""
        if self.open + count > self.limits.max_open:
            raise ApiError(
                429, f"{self.open} sequences are open, at most {self.limits.max_open}: try later."
            )
        self.open += count
        try:
            yield
        finally:
            self.open -= count

    @contextlib.contextmanager
    def _answers(self, requests: Sequence[Request]) -> Iterator[list[Answer]]:
        """Submits requests; whatever has not finished on the way out is cancelled."""
        answers = [Answer(self.worker, request) for request in requests]
        try:
            yield answers
        finally:
            for answer in answers:
                answer.close()

    async def _finish(self, requests: Sequence[Request]) -> list[texts.Choice]:
        with self._answers(requests) as answers:
            for answer in answers:
                await answer.finished()
        return [self._choice(answer) for answer in answers]

    def _choice(self, answer: Answer) -> texts.Choice:
        completion = answer.handle.completion
        if completion is None:
            raise ApiError(503, "the engine gave this request up; try again.")
        return texts.Choice(
            answer.handle.request.prompt, completion.tokens, completion.text, completion.finish
        )

    async def _complete(self, requests: Sequence[Request], body: CompletionsBody) -> Response:
        scores: list[Any] = [None] * len(requests)
        if body.logprobs is not None and body.echo and _is_probe(requests[0]):
            # What evaluation harnesses ask for: one pass tells all there is to know.
            scores = await self._score([request.prompt for request in requests], body.logprobs)
            choices = [
                texts.probe(self.decoder, request, score)
                for request, score in zip(requests, scores, strict=True)
            ]
        else:
            choices = await self._finish(requests)
            if body.logprobs is not None:
                rows = [[*choice.prompt, *choice.tokens] for choice in choices]
                scores = await self._score(rows, body.logprobs)
        described = []
        for index, (choice, score) in enumerate(zip(choices, scores, strict=True)):
            told = None
            if score is not None:
                told = texts.logprobs(self.decoder, choice, score, body.logprobs or 0, body.echo)
            echoed = self.decoder.decode(choice.prompt) if body.echo else ""
            described.append(
                {
                    "index": index,
                    "text": echoed + choice.text,
                    "logprobs": told,
                    "finish_reason": choice.finish,
                }
            )
        return self._reply("cmpl", "text_completion", described, choices, body.options.n)

    async def _score(self, rows: Sequence[Sequence[int]], top: int) -> list[Any]:
        """Scores in the engine's thread, one sequence between two bursts."""
        score = functools.partial(
            engine_scores.score_tokens, self.model.config, self.model.params, top=max(top, 1)
        )
        return [
            scores
            for row in rows
            for scores in await self.worker.call(functools.partial(score, [row]))
        ]

    async def _chat(self, requests: Sequence[Request], body: ChatBody) -> Response:
        choices = await self._finish(requests)
        described = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        return self._reply("chatcmpl", "chat.completion", described, choices, body.options.n)

    def _reply(
        self,
        prefix: str,
        kind: str,
        described: list[dict[str, Any]],
        choices: Sequence[texts.Choice],
        n: int,
    ) -> Response:
        head = self._head(prefix, kind)
        return JSONResponse(head | {"choices": described, "usage": texts.usage(choices, n)})

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model.name,
        }

    def _event_stream(
        self, requests: Sequence[Request], options: Options, echoes: list[str] | None
    ) -> Response:
        held = contextlib.ExitStack()
        held.enter_context(self._admitted(len(requests)))
        return connection.EventStream(self._stream(requests, options, echoes), held)

    async def _stream(
        self, requests: Sequence[Request], options: Options, echoes: list[str] | None
    ) -> AsyncGenerator[Any, None]:
        """Chunks of all answers as they come; without `echoes` those of a chat."""
        chatting = echoes is None
        head = (
            self._head("chatcmpl", "chat.completion.chunk")
            if chatting
            else self._head("cmpl", "text_completion")
        )

        def chunk(index: int, text: str, finish: str | None) -> dict[str, Any]:
            said: dict[str, Any] = {"text": text}
            if chatting:
                said = {"delta": {"content": text} if text else {}}
            return head | {
                "choices": [{"index": index, **said, "logprobs": None, "finish_reason": finish}]
            }

        with self._answers(requests) as answers:
            for index, _ in enumerate(answers):
                if chatting:
                    opening = {"role": "assistant", "content": ""}
                    first = {"index": index, "delta": opening, "finish_reason": None}
                    yield head | {"choices": [first]}
                elif echoes[index]:
                    yield chunk(index, echoes[index], None)
            pieces = [texts.Pieces(self.decoder, options.stop) for _ in answers]
            async with contextlib.aclosing(connection.merged(answers)) as news:
                async for index, ended in news:
                    if ended:
                        choice = self._choice(answers[index])
                        yield chunk(index, pieces[index].last(choice.text), choice.finish)
                    elif text := pieces[index].fresh(answers[index].handle.tokens):
                        yield chunk(index, text, None)
            if options.include_usage:
                choices = [self._choice(answer) for answer in answers]
                yield head | {"choices": [], "usage": texts.usage(choices, options.n)}


def _is_probe(request: Request) -> bool:
    """Whether one greedy token is asked for, which the scores of the prompt tell."""
    sampling = request.sampling
    plain = sampling.temperature == 0 and sampling.repetition_penalty == 1
    return plain and request.max_new_tokens <= 1 and not request.stop_strings


def _key(seed: int, prompt: int, number: int) -> Any:
    """Randomness of one answer; a seed has up to 64 bits."""
    words = (seed >> 32, prompt, number)
    key = jax.random.key(np.uint32(seed & 0xFFFFFFFF))
    for word in words:
        key = jax.random.fold_in(key, np.uint32(word & 0xFFFFFFFF))
    return key
