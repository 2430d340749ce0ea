"""Chat templates: exact text, the assistant's tokens, and a closed sandbox."""

import json

import pytest

from jaxllm.data import chat
from jaxllm.data import tokenizers as tokenizers_lib

MESSAGES = [
    {"role": "user", "content": "Is 1 < 2?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Très sûr!"},
]
SMOLLM2 = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nIs 1 < 2?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nTrès sûr!<|im_end|>\n"
)
GENERATION = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def smollm2(shared_dir):
    return tokenizers_lib.load_tokenizer(shared_dir / "data/tokenizers/smollm2")


def test_literal_text(smollm2):
    template = chat.load_chat_template(smollm2)
    assert template.render(MESSAGES) == SMOLLM2
    prompt = template.render(MESSAGES[:3], add_generation_prompt=True)
    assert prompt == SMOLLM2[: SMOLLM2.rindex("Très")]


def test_golden_prompt_of_the_checkpoint(smollm2, shared_dir):
    import numpy as np

    template = chat.load_chat_template(shared_dir / "data/tokenizers/smollm2")
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "What is 2+3? Answer briefly."},
    ]
    text = template.render(messages, add_generation_prompt=True)
    with np.load(shared_dir / "golden/models/smollm2-135m-instruct-q4_1.npz") as arrays:
        expected = arrays["ids_1"].tolist()
    assert smollm2.encode(text)[-len(expected) :] == expected


def test_weights_of_the_assistants_turns(smollm2):
    template = chat.load_chat_template(smollm2)
    ids, weights = chat.encode_chat(template, smollm2, MESSAGES)
    assert smollm2.decode(ids) == SMOLLM2
    assert smollm2.decode(ids[weights == 1]) == "Yes.<|im_end|>Très sûr!<|im_end|>"
    assert set(weights.tolist()) == {0.0, 1.0}


def test_generation_blocks_give_the_same_for_any_tokenizer(shared_dir):
    template = chat.ChatTemplate(GENERATION)
    for name in ("byte", shared_dir / "data/tokenizers/mistral/tokenizer.model.v1"):
        tokenizer = tokenizers_lib.load_tokenizer(name)
        ids, weights = chat.encode_chat(template, tokenizer, MESSAGES)
        assert tokenizer.decode(ids[weights == 1]) == "Yes.</s>Très sûr!</s>"
        assert tokenizer.decode(ids) == template.render(MESSAGES)
    with pytest.raises(chat.ChatError, match="used to mark spans"):
        template.spans([{"role": "user", "content": "\ue0f0"}])


def test_thinking_in_the_generation_prompt_is_no_target(shared_dir):
    tokenizer = tokenizers_lib.load_tokenizer(shared_dir / "data/tokenizers/minimind-6400")
    template = chat.load_chat_template(tokenizer)
    text, spans = template.spans(MESSAGES)
    assert [text[a:b] for a, b in spans] == ["Yes.<|im_end|>", "Très sûr!<|im_end|>"]
    assert text.count("<think>\n\n</think>") == 2


def test_template_that_rewrites_the_past_is_refused():
    source = "{% for m in messages %}{{ m.content if loop.last else '' }}|{% endfor %}"
    with pytest.raises(chat.ChatError, match="message 1: the template renders this turn differ"):
        chat.ChatTemplate(source).spans(MESSAGES)


def test_functions_of_the_hub_templates():
    def render(source, **variables):
        return chat.ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **variables)

    assert render("{{ bos_token }}{{ tools | tojson }}", tools=["<é>"]) == '<s>["<é>"]'
    assert render("{{ x | tojson(indent=1) }}", x={"b": 1}) == '{\n "b": 1\n}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("{% if true %}\n  x\n{% endif %}\n") == "  x\n"  # blocks eat their line
    with pytest.raises(chat.ChatError, match="chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{% include '/etc/hostname' %}",
        "{{ range(10000000) | list | length }}",
    ],
)
def test_nothing_escapes_the_sandbox(source):
    # Either refused, or an attribute that the template sees as undefined and that prints nothing.
    try:
        text = chat.ChatTemplate(source).render(MESSAGES)
    except chat.ChatError:
        return
    assert text == ""
    with pytest.raises(chat.ChatError, match="sandbox"):
        chat.ChatTemplate(source.replace(" }}", ".keys() }}")).render(MESSAGES)


def test_errors_name_the_place():
    with pytest.raises(chat.ChatError, match="line 2"):
        chat.ChatTemplate("a\n{% for %}").render(MESSAGES)
    with pytest.raises(chat.ChatError, match="ZeroDivisionError"):
        chat.ChatTemplate("{{ 1 / 0 }}").render(MESSAGES)
    with pytest.raises(chat.ChatError, match="message 0: expected"):
        chat.ChatTemplate("x").render([{"content": "no role"}])
    with pytest.raises(chat.ChatError, match="a list was expected, not str"):
        chat.ChatTemplate("x").render("hello")


def test_named_templates_and_files(tmp_path):
    config = {
        "chat_template": [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
        ]
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat.load_chat_template(tmp_path).render(MESSAGES) == "plain"
    assert chat.load_chat_template(tmp_path, "tool_use").render(MESSAGES) == "tools"
    with pytest.raises(chat.ChatError, match="no chat template 'rag'; it has default, tool_use"):
        chat.load_chat_template(tmp_path, "rag")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert chat.load_chat_template(tmp_path).render(MESSAGES) == "from the file"
