"""The server over real connections: answers, refusals, clients in numbers, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import pathlib
import socket
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from jaxllm.data.byte_tokenizer import ByteTokenizer  # noqa: E402
from jaxllm.data.chat import ChatTemplate  # noqa: E402
from jaxllm.inference import engine_slots  # noqa: E402
from jaxllm.inference.generate import sample  # noqa: E402
from jaxllm.inference.scoring import score_continuations  # noqa: E402
from jaxllm.models.config import ModelConfig  # noqa: E402
from jaxllm.models.parameters import init_params  # noqa: E402
from jaxllm.serving.app import Limits, ServedModel, create_app  # noqa: E402

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
LIMITS = Limits(num_slots=4, max_length=1024, max_open=256, max_body=2**20)
STOP = 40
ENDLESS = {"prompt": "endless", "max_tokens": 1000, "temperature": 0}  # meets no stop token


class Live:
    """A server that listens, and a client of it."""

    def __init__(self, app: Any, url: str) -> None:
        self.server = app.state.server
        self.url = url
        host, port = url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=120)

    def post(self, path: str = COMPLETIONS, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def answer(self, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str = COMPLETIONS, **body: Any) -> list[dict[str, Any]]:
        """The objects of a stream."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n") if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def refusal(self, status: int, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def hang_up(self, begun: int, **body: Any) -> None:
        """Sends a request, reads so many bytes of the reply, and leaves."""
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.create_connection(self.address) as connection:
            connection.sendall(head.encode() + data)
            while begun > 0:
                begun -= len(connection.recv(begun))
            self.wait(lambda: self.server.open > 0)

    def wait(self, holds: Any) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def idle(self) -> bool:
        return self.server.open == self.server.engine.num_running == 0


def resident_bytes() -> int:
    """Memory of this process."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().split("\n") if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


@contextlib.contextmanager
def serving(app: Any):
    """Runs an application in a thread until the block is left."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    live = Live(app, "http://{}:{}".format(*listening.getsockname()))
    try:
        yield live
    finally:
        live.client.close()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def model() -> ServedModel:
    config = ModelConfig(
        vocab_size=260, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=24, initializer_range=0.4
    )
    params = init_params(config, jax.random.key(0))
    return ServedModel(
        "tiny", config, params, ByteTokenizer(), ChatTemplate(TEMPLATE), stop_tokens=(STOP,)
    )


@pytest.fixture(scope="module")
def live(model):
    with serving(create_app(model, LIMITS)) as live:
        yield live
        live.wait(live.idle)
    assert not live.server.worker.alive


def test_answers_are_those_of_the_library(live, model):
    prompts = ["one", "and a second"]
    answer = live.answer(prompt=prompts, max_tokens=9, temperature=0, model="tiny")
    expected = sample(
        model.config,
        model.params,
        [model.tokenizer.encode(prompt) for prompt in prompts],
        max_new_tokens=9,
        stop_tokens=(STOP,),
    )
    for choice, (completion,) in zip(answer["choices"], expected, strict=True):
        assert choice["text"] == model.tokenizer.decode(completion.tokens, skip_special=True)
        assert choice["finish_reason"] == completion.finish
    made = sum(len(completion.tokens) for (completion,) in expected)
    assert answer["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": made,
        "total_tokens": 15 + made,
    }
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    ids = live.answer(prompt=model.tokenizer.encode("one"), max_tokens=9, temperature=0)
    assert ids["choices"][0] == answer["choices"][0]
    chat = live.answer(
        CHAT, messages=[{"role": "user", "content": "one"}], max_tokens=9, temperature=0
    )
    plain = live.answer(prompt="<one>", max_tokens=9, temperature=0)["choices"][0]
    message = {"role": "assistant", "content": plain["text"]}
    assert chat["choices"][0]["message"] == message


def test_seeds_repeat_and_samples_differ(live):
    def texts(**options: Any) -> list[str]:
        answer = live.answer(prompt="one", max_tokens=8, n=3, **options)
        return [choice["text"] for choice in answer["choices"]]

    first = texts(seed=2**40)
    assert len(set(first)) == 3
    assert texts(seed=2**40) == first
    assert texts(seed=2**40 + 2**35) != first != texts() != texts()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_what_the_whole_answer_says(live, path):
    options = {"n": 2, "seed": 3, "max_tokens": 60, "stop": ["e", "\\"]}
    given = {"prompt": "one"}
    if path == CHAT:
        given = {"messages": [{"role": "user", "content": "hi"}]}
    whole = live.answer(path, **given, **options)
    events = live.events(path, **given, **options, stream_options={"include_usage": True})
    assert events.pop()["usage"] == whole["usage"]
    said = {0: "", 1: ""}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        said[choice["index"]] += delta
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert said[choice["index"]] == text
        assert "e" not in text
    finishes = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == sorted(choice["finish_reason"] for choice in whole["choices"])
    if path == COMPLETIONS:
        echoed = live.events(prompt="one", echo=True, max_tokens=2)
        assert echoed[0]["choices"][0]["text"] == "one"


def test_log_probs_of_prompts_serve_evaluation_harnesses(live, model):
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(35, 129, 4).tolist(), rng.integers(35, 129, 3).tolist()) for _ in "abc"]
    # The third continuation is what the model would say.
    context = pairs[2][0]
    ((said,),) = sample(model.config, model.params, [context], max_new_tokens=3, stop_tokens=())
    pairs[2] = (context, said.tokens)
    # What lm-evaluation-harness sends, and how it reads the reply.
    answer = live.answer(
        model="tiny",
        prompt=[context + rest for context, rest in pairs],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    expected = score_continuations(model.config, model.params, pairs)
    for choice, (context, _), score in zip(answer["choices"], pairs, expected, strict=True):
        told = choice["logprobs"]
        token_logprobs = told["token_logprobs"][len(context) : -1]
        top = [max(found.values()) for found in told["top_logprobs"][len(context) : -1]]
        np.testing.assert_allclose(token_logprobs, score.log_probs, atol=1e-4)
        assert (token_logprobs == top) == score.is_greedy
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert choice["text"].startswith("".join(told["tokens"][: len(context)]))
    assert [score.is_greedy for score in expected] == [False, False, True]
    # Sampled answers, several likeliest tokens, without and with the prompt.
    options = {"prompt": pairs[0][0], "max_tokens": 4, "seed": 0, "logprobs": 3}
    told = live.answer(**options)["choices"][0]["logprobs"]
    whole = live.answer(**options, echo=True)["choices"][0]["logprobs"]
    assert whole["token_logprobs"][4:] == told["token_logprobs"]
    for log_prob, top, name in zip(
        told["token_logprobs"], told["top_logprobs"], told["tokens"], strict=True
    ):
        assert 3 <= len(top) <= 4 and top[name] == log_prob
    nothing_new = live.answer(prompt=pairs[0][0], max_tokens=0, echo=True, logprobs=1)
    assert len(nothing_new["choices"][0]["logprobs"]["tokens"]) == 4


def test_two_hundred_clients_at_once(live):
    async def ask() -> list[Any]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=live.url, trust_env=False, timeout=300, limits=limits
        ) as client:
            bodies = [
                {"prompt": f"prompt {i % 8}", "max_tokens": 1 + i % 8, "temperature": 0}
                for i in range(200)
            ]
            return await asyncio.gather(*(client.post(COMPLETIONS, json=b) for b in bodies))

    responses = asyncio.run(ask())
    assert {response.status_code for response in responses} == {200}
    texts = [response.json()["choices"][0]["text"] for response in responses]
    for first in range(8):
        assert len(set(texts[first::8])) == 1
    alone = live.answer(prompt="prompt 7", max_tokens=8, temperature=0)
    assert texts[7] == alone["choices"][0]["text"]
    assert live.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slots(live, monkeypatch, stream):
    cancelled = []
    cancel = live.server.worker.cancel
    monkeypatch.setattr(
        live.server.worker, "cancel", lambda handle: (cancelled.append(handle), cancel(handle))
    )
    # More than there are slots: some wait.
    live.hang_up(100 if stream else 0, **ENDLESS, n=6, stream=stream)
    live.wait(live.idle)
    live.wait(lambda: len(cancelled) == 6)
    live.wait(lambda: all(handle.cancelled for handle in cancelled))
    assert max(len(handle.tokens) for handle in cancelled) < 1000


def test_bad_input_is_refused_with_a_reason(live):
    response = live.client.post(COMPLETIONS, content=b'{"prompt": ')
    assert response.status_code == 400 and "not valid JSON" in response.json()["error"]["message"]
    assert live.refusal(400, prompt="x", max_tokens="many")["param"] == "max_tokens"
    unknown = live.refusal(404, prompt="x", model="gpt-5")
    assert unknown["code"] == "model_not_found" and "'tiny'" in unknown["message"]
    assert "max_length=1024" in live.refusal(400, prompt="x" * 1000, max_tokens=25)["message"]
    assert "token id 260" in live.refusal(400, prompt=[260])["message"]
    assert "surrogate" in live.client.post(COMPLETIONS, content=b'{"prompt": "\\ud800"}').text
    bad = [{"role": "user", "content": 5}]
    assert live.refusal(400, CHAT, messages=bad)["param"] == "messages[0]"
    assert live.client.get("/v2").status_code == 404
    response = live.client.get(COMPLETIONS)
    assert response.status_code == 405 and COMPLETIONS in response.json()["error"]["message"]


def test_a_prompt_of_ten_megabytes_is_refused(live):
    error = live.refusal(413, prompt="x" * 10_000_000)
    assert str(2**20) in error["message"]
    # Not even read where it says how large it is.
    with socket.create_connection(live.address) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {10**11}\r\n\r\n".encode()
        )
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_full_queue_says_try_later(live, monkeypatch):
    few = dataclasses.replace(LIMITS, max_open=3)
    monkeypatch.setattr(live.server, "limits", few)
    assert "at most 3" in live.refusal(400, prompt="x", n=4)["message"]
    with live.client.stream(
        "POST", COMPLETIONS, json={**ENDLESS, "n": 2, "stream": True}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        error = live.refusal(429, prompt="x", n=2, max_tokens=1)
        assert error["type"] == "rate_limit_error" and "later" in error["message"]
        live.answer(prompt="x", max_tokens=1)
    live.wait(live.idle)


def test_models_and_health(live):
    (card,) = live.client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == 1024
    health = live.client.get("/health").json()
    assert health == {"status": "ok", "model": "tiny", "slots": 4, "running": 0, "open": 0}


def test_a_step_that_fails_ends_its_requests_only(live, monkeypatch):
    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine_slots, "advance", out_of_memory)
        assert "gave this request up" in live.refusal(503, prompt="x", max_tokens=3)["message"]
        error = live.events(prompt="x", max_tokens=3)[-1]["error"]
        assert error["type"] == "server_error"
    live.answer(prompt="x", max_tokens=3)
    assert live.client.get("/health").status_code == 200


def test_memory_does_not_grow(live):
    def round_of_requests() -> None:
        for seed in range(6):
            live.answer(prompt=["a", "b", "c"], max_tokens=5, seed=seed, logprobs=1)
            live.events(CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=9, seed=seed)
            live.refusal(400, prompt=[999])
        live.hang_up(50, **ENDLESS, n=6, stream=True)
        live.wait(live.idle)

    def used() -> tuple[int, int]:
        gc.collect()
        arrays = jax.live_arrays()
        return len(arrays), sum(array.nbytes for array in arrays)

    round_of_requests()
    before, resident = used(), resident_bytes()
    for _ in range(3):
        round_of_requests()
        assert used() == before
    assert resident_bytes() - resident < 16 * 2**20
