"""Tokenizers give the ids of the reference implementations, and refuse what they cannot read."""

import json
import pathlib

import numpy as np
import pytest

from jaxllm.data import bpe, gguf_tokenizer, hf_tokenizer
from jaxllm.data import tokenizers as tokenizers_lib
from jaxllm.data.errors import TokenizerError

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "tokenizers.json").read_text("utf-8")
)
SENTENCEPIECE = [name for name in GOLDEN["no_special"] if name not in GOLDEN["with_special"]]


@pytest.mark.parametrize("name", GOLDEN["no_special"])
def test_golden_encodings(shared_dir, name):
    tokenizer = tokenizers_lib.load_tokenizer(shared_dir / "data" / name)
    texts, expected = GOLDEN["texts"], GOLDEN["no_special"][name]
    assert [tokenizer.encode(text) for text in texts] == expected
    assert tokenizer.encode_batch(texts) == expected
    assert [tokenizer.encode_with_offsets(text)[0] for text in texts] == expected
    assert [tokenizer.decode(ids) for ids in expected] == GOLDEN["decoded"][name]
    assert max(max(ids, default=0) for ids in expected) < tokenizer.vocab_size
    if name in GOLDEN["with_special"]:
        special = GOLDEN["with_special"][name]
        assert [tokenizer.encode(text, add_special=True) for text in texts] == special
        assert tokenizer.encode_batch(texts, add_special=True) == special


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_special_tokens(shared_dir, name):
    tokenizer = tokenizers_lib.load_tokenizer(shared_dir / "data" / name)
    plain = tokenizer.encode("Hello")
    assert tokenizer.encode("Hello", add_special=True) == [tokenizer.bos_id, *plain]
    assert tokenizer.encode_batch(["Hello"], add_special=True) == [[tokenizer.bos_id, *plain]]


@pytest.mark.parametrize(
    "name", ["tokenizers/smollm2", "tokenizers/mistral/tokenizer.model.v1", "byte"]
)
def test_offsets_point_at_the_text(shared_dir, name):
    spec = name if name == "byte" else shared_dir / "data" / name
    tokenizer = tokenizers_lib.load_tokenizer(spec)
    text = "A naïve café: 你好 end"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert len(ids) == len(offsets)
    # Up to a word's end, the tokens that end there decode to the text up to there.
    for end in (1, 7, 12):
        before = [token for token, span in zip(ids, offsets, strict=True) if span[1] <= end]
        assert tokenizer.decode(before).strip() == text[:end]


def test_prompts_of_golden_models(shared_dir):
    with np.load(shared_dir / "golden/models/stories260k.npz") as arrays:
        tokenizer = tokenizers_lib.load_tokenizer(shared_dir / "data/models/stories260k")
        for i, prompt in enumerate(arrays["prompts"]):
            ids = tokenizer.encode(str(prompt), add_special=True)
            assert ids == arrays[f"ids_{i}"].tolist()
    with np.load(shared_dir / "golden/models/smollm2-135m-instruct-q4_1.npz") as arrays:
        tokenizer = tokenizers_lib.load_tokenizer(shared_dir / "data/tokenizers/smollm2")
        for i, prompt in enumerate(arrays["prompts"]):
            assert tokenizer.encode(str(prompt)) == arrays[f"ids_{i}"].tolist()
        answer = tokenizer.decode(arrays["greedy_0"], skip_special=True)
    assert answer.startswith("The capital of France is Paris.")


def write_gguf(path, tokens, merges, special):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_token_types([3 if i < special else 1 for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_gguf_tokenizer_equals_its_origin(tmp_path):
    origin = bpe.train_bpe([*GOLDEN["texts"], "the cat and the hat " * 9], 320)
    model = json.loads(origin.backend.to_str())["model"]
    path = tmp_path / "tokenizer.gguf"
    write_gguf(path, sorted(model["vocab"], key=model["vocab"].get), model["merges"], 2)

    tokenizer = tokenizers_lib.load_tokenizer(path)
    expected = origin.encode_batch(GOLDEN["texts"], True)
    assert tokenizer.encode_batch(GOLDEN["texts"], True) == expected
    assert [tokenizer.decode(ids) for ids in expected] == GOLDEN["texts"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 1, 0)
    assert tokenizer.decode([1], skip_special=True) == ""
    assert tokenizer.config["chat_template"] == "{{ messages[0].content }}"
    other = gguf_tokenizer.tokenizer_from_gguf(path, pre="gpt-2")
    pieces = [t.backend.pre_tokenizer.pre_tokenize_str(" 24") for t in (tokenizer, other)]
    assert [len(found) for found in pieces] == [3, 1]
    with pytest.raises(TokenizerError, match="'nothing'; expected one of gpt-2, smollm"):
        gguf_tokenizer.tokenizer_from_gguf(path, pre="nothing")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(TokenizerError, match="cut.gguf: not a readable GGUF file"):
        tokenizers_lib.load_tokenizer(cut)


@pytest.mark.slow
def test_gguf_tokenizer_of_full_size(shared_dir, tmp_path):
    name = "tokenizers/smollm2"
    definition = (shared_dir / "data" / name / "tokenizer.json").read_text("utf-8")
    model = json.loads(definition)["model"]
    path = tmp_path / "tokenizer.gguf"
    write_gguf(path, sorted(model["vocab"], key=model["vocab"].get), model["merges"], 17)
    tokenizer = tokenizers_lib.load_tokenizer(path)
    assert tokenizer.encode_batch(GOLDEN["texts"]) == GOLDEN["no_special"][name]
    decoded = [tokenizer.decode(ids) for ids in GOLDEN["no_special"][name]]
    assert decoded == GOLDEN["decoded"][name]


def test_byte_tokenizer():
    tokenizer = tokenizers_lib.load_tokenizer("byte")
    assert tokenizer.encode("aé") == [100, 0xC3 + 3, 0xA9 + 3]
    assert tokenizer.encode_batch(["a", ""], add_special=True) == [[100, 1], [1]]
    assert tokenizer.decode([100, 0xC3 + 3, 0xA9 + 3, 1, 0, 300]) == "aé</s><pad>"
    assert tokenizer.decode([100, 1, 0], skip_special=True) == "a"
    assert tokenizer.vocab_size == 259
    with pytest.raises(TokenizerError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_trained_bpe_is_deterministic_and_reloads(tmp_path):
    texts = ["the cat sat on the mat 12 times " * 20, "a naïve café 你好\n" * 10]
    first, again = (bpe.train_bpe(texts, 300, special_tokens=["<user>"]) for _ in range(2))
    assert first.fingerprint() == again.fingerprint()
    assert (first.pad_id, first.eos_id, first.bos_id) == (0, 1, 1)
    assert first.encode("<user>") == [2]
    assert first.vocab_size <= 300
    assert len(first.encode("the cat")) < len("the cat")
    assert first.encode("12") == [first.encode("1")[0], first.encode("2")[0]]
    unseen = "Ω never seen 🌍"
    assert first.decode(first.encode(unseen)) == unseen
    first.save(tmp_path)
    loaded = tokenizers_lib.load_tokenizer(tmp_path)
    assert loaded.fingerprint() == first.fingerprint()
    assert loaded.encode(texts[1]) == first.encode(texts[1])
    other = bpe.train_bpe([*texts, "dog dog dog"], 300)
    assert other.fingerprint() != first.fingerprint()
    with pytest.raises(TokenizerError, match="vocab_size is 257"):
        bpe.train_bpe(texts, 257)
    with pytest.raises(TokenizerError, match="no text"):
        bpe.train_bpe([], 300)


def test_configuration_decides_the_special_tokens(shared_dir):
    definition = (shared_dir / "data/models/stories260k/tokenizer.json").read_text("utf-8")
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}

    def encode(**flags):
        made = hf_tokenizer.HuggingFaceTokenizer(definition, {**names, **flags})
        return made.encode("a", add_special=True), made.encode("a")

    both, plain = encode()
    assert both == [1, *plain]
    assert encode(add_bos_token=False)[0] == plain
    assert encode(add_bos_token=True, add_eos_token=True)[0] == [1, *plain, 2]
    fingerprints = {
        hf_tokenizer.HuggingFaceTokenizer(definition, {**names, **flags}).fingerprint()
        for flags in ({}, {"add_bos_token": False}, {"add_eos_token": True})
    }
    assert len(fingerprints) == 3


def test_tokens_that_only_the_configuration_adds(shared_dir):
    definition = (shared_dir / "data/models/stories260k/tokenizer.json").read_text("utf-8")
    entry = {"content": "<extra>", "special": True, "normalized": False}
    config = {"added_tokens_decoder": {"512": entry}}
    tokenizer = hf_tokenizer.HuggingFaceTokenizer(definition, config)
    assert tokenizer.vocab_size == 513
    assert 512 in tokenizer.encode("a<extra>b")
    assert "<extra>" not in tokenizer.decode([512], skip_special=True)
    wrong = {"added_tokens_decoder": {"600": entry}}
    with pytest.raises(TokenizerError, match="has id 512, but tokenizer_config.json says 600"):
        hf_tokenizer.HuggingFaceTokenizer(definition, wrong)
    with pytest.raises(TokenizerError, match="eos_token '<none>' is not in the vocabulary"):
        hf_tokenizer.HuggingFaceTokenizer(definition, {"eos_token": "<none>"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither tokenizer.json nor tokenizer.model"),
        ({"vocab.json": "{}"}, "found vocab.json"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: not a tokenizer.json"),
        ({"tokenizer.json": "[1]"}, "a JSON object was expected"),
        ({"tokenizer.json": '{"version":'}, "tokenizer.json: not a tokenizer.json"),
        ({"tokenizer.json.gz": "no gzip"}, "tokenizer.json.gz: cannot be read"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "tokenizer_config.json: not JSON"),
        ({"tokenizer.model": "no model"}, "not a readable sentencepiece model"),
        ({"tokenizer.model": ""}, "tokenizer.model"),
    ],
)
def test_unreadable_tokenizers_are_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        tokenizers_lib.load_tokenizer(tmp_path)


def test_unknown_paths_and_texts_are_refused(tmp_path, shared_dir):
    with pytest.raises(TokenizerError, match="no tokenizer at 'no/such'"):
        tokenizers_lib.load_tokenizer("no/such")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(TokenizerError, match="unknown kind of tokenizer file"):
        tokenizers_lib.load_tokenizer(tmp_path / "x.txt")
    with pytest.raises(TokenizerError, match="not int"):
        tokenizers_lib.load_tokenizer(3)
    for name in ("data/tokenizers/gpt2", "data/tokenizers/mistral/tokenizer.model.v1"):
        tokenizer = tokenizers_lib.load_tokenizer(shared_dir / name)
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.encode("a\ud800")
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.encode_batch(["fine", "a\ud800"])
        with pytest.raises(TokenizerError, match="token -1 is negative"):
            tokenizer.decode([-1])
        assert tokenizer.decode([tokenizer.vocab_size]) == ""
