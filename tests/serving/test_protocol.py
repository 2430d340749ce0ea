"""Bodies of requests are checked field by field."""

from __future__ import annotations

import pytest

from jaxllm.inference.sampling import SamplingConfig
from jaxllm.serving import protocol
from jaxllm.serving.protocol import ApiError


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", ["hi"]),
        (["hi", "there"], ["hi", "there"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_forms(prompt, parsed):
    assert protocol.parse_completions({"prompt": prompt}).prompts == parsed


def test_defaults_are_those_of_openai():
    body = protocol.parse_completions({"prompt": "hi", "stop": None, "user": "me", "top_p": 1})
    options = body.options
    assert options.sampling == SamplingConfig(temperature=1.0)
    assert (options.n, options.max_tokens, options.stop, options.stream) == (1, None, (), False)
    assert (body.echo, body.logprobs) == (False, None)
    chat = protocol.parse_chat(
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": 3,
            "stop": "x",
            "temperature": 0,
            "top_k": -1,
        }
    )
    assert chat.messages == [{"role": "user", "content": "hi"}]
    assert chat.options.max_tokens == 3 and chat.options.stop == ("x",)
    assert chat.options.sampling == SamplingConfig()


WRONG = {
    "prompt": [None, 3, [], [[]], [1, "a"], [1.5], {"text": "hi"}, [True]],
    "max_tokens": [-1, 1.5, "3", True],
    "temperature": [-0.1, "hot", float("nan"), float("inf"), True, 10**400],
    "top_p": [0, 1.01, "x"],
    "top_k": [-2, 0.5],
    "min_p": [2],
    "n": [0, 1000],
    "seed": ["x", 2**63],
    "stop": ["", [""], [1], ["x"] * 17, {"a": 1}],
    "stream": [1, "yes"],
    "stream_options": [True],
    "logprobs": [-1, True, 100],
    "echo": ["yes"],
    "model": [7],
    "best_of": [2],
    "suffix": ["end"],
    "frequency_penalty": [0.5],
    "logit_bias": [{"5": 1}],
    "tempperature": [1],
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_fields_are_named(field):
    for value in WRONG[field]:
        with pytest.raises(ApiError) as refusal:
            protocol.parse_completions({"prompt": "hi"} | {field: value})
        assert refusal.value.status == 400 and refusal.value.param == field
        assert field in str(refusal.value) and "expected" in str(refusal.value)
        assert refusal.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [3], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": 1}]],
)
def test_wrong_messages_are_named(messages):
    with pytest.raises(ApiError, match="messages") as refusal:
        protocol.parse_chat({"messages": messages})
    assert refusal.value.status == 400


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b'"x"', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(ApiError, match="the body") as refusal:
        protocol.parse_json(data)
    assert refusal.value.status == 400
