"""From records to tokens and loss weights."""

import pytest

from jaxllm.data import chat, preprocessors, sources
from jaxllm.data import tokenizers as tokenizers_lib
from jaxllm.data.errors import DataError

BYTE = tokenizers_lib.load_tokenizer("byte")
TEMPLATE = chat.ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def weighted(example, part="tokens"):
    """The whole text, and what of it is predicted."""
    tokens, weights = example[part], example[preprocessors.weights_name(part)]
    assert len(tokens) == len(weights)
    return BYTE.decode(tokens), BYTE.decode(tokens[weights == 1])


def test_language_modeling(shared_dir):
    step = preprocessors.LanguageModeling(BYTE)
    assert BYTE.decode(step({"text": "né"})["tokens"]) == "né</s>"
    assert step({"text": "né"})["bytes"] == 3
    assert len(step({"text": ""})["tokens"]) == 0
    many = step.many([{"text": "a"}, {"text": "b"}])
    assert [BYTE.decode(example["tokens"]) for example in many] == ["a</s>", "b</s>"]
    with pytest.raises(DataError, match="'text' is missing; it has body"):
        step({"body": "x"})
    with pytest.raises(DataError, match="no bos_id"):
        preprocessors.LanguageModeling(BYTE, add_bos=True)

    llama = tokenizers_lib.load_tokenizer(shared_dir / "data/models/stories260k")
    ids = preprocessors.LanguageModeling(llama)({"text": "Tim"})["tokens"].tolist()
    assert ids == [1, *llama.encode("Tim"), 2]
    gpt2 = tokenizers_lib.load_tokenizer(shared_dir / "data/tokenizers/gpt2")
    end = gpt2.eos_id
    ids = preprocessors.LanguageModeling(gpt2, add_bos=True)({"text": "Tim"})["tokens"].tolist()
    assert ids == [end, *gpt2.encode("Tim"), end]


def test_prompt_response():
    step = preprocessors.PromptResponse(BYTE, "Q: {question}\nA: ", "{answer}")
    example = step({"question": "1+1?", "answer": "2"})
    assert weighted(example) == ("Q: 1+1?\nA: 2</s>", "2</s>")
    assert example["bytes"] == 1
    assert step({"question": "1+1?", "answer": ""}) is None
    with pytest.raises(DataError, match="the field 'answer' is missing; it has question"):
        step({"question": "x"})
    with_template = preprocessors.PromptResponse(BYTE, template=TEMPLATE, system="S")
    text = weighted(with_template({"prompt": "p", "response": "r"}))
    assert text == ("<system>S;<user>p;<assistant>r;", "r;")


def test_prompt_keeps_its_begin_token(shared_dir):
    llama = tokenizers_lib.load_tokenizer(shared_dir / "data/models/stories260k")
    step = preprocessors.PromptResponse(llama)
    example = step({"prompt": "Tim", "response": " ran"})
    tail = [*llama.encode(" ran"), llama.eos_id]
    assert example["tokens"].tolist() == [llama.bos_id, *llama.encode("Tim"), *tail]
    assert example["weights"].tolist() == [0] * (len(example["tokens"]) - len(tail)) + [1] * len(
        tail
    )


def test_conversation_and_sharegpt():
    step = preprocessors.Conversation(BYTE, TEMPLATE, "conversations")
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "bé"},
        {"from": "human", "value": "c"},
        {"from": "gpt", "value": "d"},
    ]
    example = step({"conversations": turns})
    assert weighted(example) == ("<user>a;<assistant>bé;<user>c;<assistant>d;", "bé;d;")
    assert example["bytes"] == 4
    assert step({"conversations": turns[:1]}) is None
    with pytest.raises(DataError, match=r"conversations\[0\] is no message"):
        step({"conversations": [{"text": "x"}]})


def test_preference_layouts(shared_dir):
    texts = preprocessors.Preference(BYTE, prompt="{prompt}")
    example = texts({"prompt": "p", "chosen": "good", "rejected": "bad"})
    assert weighted(example, "chosen") == ("pgood</s>", "good</s>")
    assert weighted(example, "rejected") == ("pbad</s>", "bad</s>")
    assert texts({"prompt": "p", "chosen": "same", "rejected": "same"}) is None

    folder = shared_dir / "data/preference"
    dialogues = preprocessors.Preference(BYTE)
    for record in sources.JsonLines(
        folder / "hh_rlhf_harmless_test_filtered.jsonl", text_fields=("chosen", "rejected")
    ):
        example = dialogues(record)
        for part in ("chosen", "rejected"):
            text, answer = weighted(example, part)
            assert text == record[part] + "</s>"
            assert text.removesuffix(answer).endswith("\n\nAssistant:")
    with pytest.raises(DataError, match="share no beginning"):
        dialogues({"chosen": "a", "rejected": "b"})

    messages = preprocessors.Preference(BYTE, history="conversations", template=TEMPLATE)
    record = next(
        iter(
            sources.JsonLines(
                folder / "dpo_en_demo.jsonl", (), ("conversations", "chosen", "rejected")
            )
        )
    )
    example = messages(record)
    assert weighted(example, "chosen")[1] == record["chosen"]["value"] + ";"
    assert weighted(example, "rejected")[1] == record["rejected"]["value"] + ";"
    turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "early"},
        {"role": "user", "content": "v"},
    ]
    whole = preprocessors.Preference(BYTE, template=TEMPLATE)
    example = whole(
        {
            "chosen": [*turns, {"role": "assistant", "content": "good"}],
            "rejected": [*turns, {"role": "assistant", "content": "bad"}],
        }
    )
    assert weighted(example, "chosen")[1] == "good;"
    with pytest.raises(DataError, match="does not end with the assistant"):
        whole({"chosen": turns, "rejected": [*turns, turns[1]]})


def test_forget_and_retain_divide_a_source():
    records = [{"author": name, "text": name} for name in "abcab"]
    steps = preprocessors.forget_retain("author", ["a"])
    kept = {name: [r["text"] for r in records if step(r)] for name, step in steps.items()}
    assert kept == {"forget": ["a", "a"], "retain": ["b", "c", "b"]}


def test_from_a_config():
    step = preprocessors.make_preprocessor("language_modeling", BYTE, field="body")
    assert BYTE.decode(step({"body": "x"})["tokens"]) == "x</s>"
    with pytest.raises(DataError, match="'rlhf' is unknown; expected language_modeling"):
        preprocessors.make_preprocessor("rlhf", BYTE)
    with pytest.raises(DataError, match="has no option 'feild'; expected add_bos"):
        preprocessors.make_preprocessor("language_modeling", BYTE, feild="x")
    with pytest.raises(DataError, match="needs a chat template"):
        preprocessors.make_preprocessor("conversation", BYTE)
