"""The token cache: exact contents, bad records, damage, and builders at the same time."""

import json
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.data import cache as cache_lib
from jaxllm.data import cache_builder, preprocessors, sources
from jaxllm.data import tokenizers as tokenizers_lib
from jaxllm.data.errors import CacheError, DataError, RecordError

BYTE = tokenizers_lib.load_tokenizer("byte")
LM = preprocessors.LanguageModeling(BYTE)
TEXTS = ["one", "two two", "", "drei äöü"]


def build(root, texts=TEXTS, step=LM, **options):
    source = sources.Examples([{"text": text} for text in texts])
    return cache_builder.build_cache(root, "demo", {"train": source}, step, BYTE, **options)


def drop_two(example):
    return None if example["text"].startswith("two") else example


def damage(cache, name, change):
    path = cache.path / name
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))
    return path


def test_contents(tmp_path):
    cache = build(tmp_path)
    split = cache.split("train")
    documents = [BYTE.decode(split.document(i)) for i in range(split.num_documents)]
    assert documents == ["one</s>", "two two</s>", "drei äöü</s>"]
    assert split.tokens.dtype == np.uint16
    assert split.weights is None
    assert split.text_bytes == sum(len(text.encode()) for text in TEXTS)
    entry = cache.manifest["splits"]["train"]
    assert (entry["documents"], entry["empty"], entry["filtered"]) == (3, 1, 0)
    assert not list(tmp_path.glob(".*"))
    cache_lib.open_cache(cache.path, verify_checksums=True)
    with pytest.raises(CacheError, match="no split 'test'; it has train"):
        cache.split("test")


def test_built_once_and_anew_for_another_recipe(tmp_path):
    first = build(tmp_path)
    time = (first.path / "manifest.json").stat().st_mtime_ns
    again = build(tmp_path)
    assert again.path == first.path
    assert (first.path / "manifest.json").stat().st_mtime_ns == time
    paths = {
        first.path,
        build(tmp_path, TEXTS[:2]).path,
        build(tmp_path, step=[drop_two, LM]).path,
        build(tmp_path, step=preprocessors.LanguageModeling(BYTE, add_eos=False)).path,
        build(tmp_path, on_bad="skip").path,
    }
    assert len(paths) == 5
    elsewhere = build(tmp_path / "other")
    assert elsewhere.fingerprint() == first.fingerprint()


def test_filtered_records_are_counted(tmp_path):
    cache = build(tmp_path, step=[drop_two, LM])
    assert cache.manifest["splits"]["train"]["filtered"] == 1
    assert cache.split("train").num_documents == 2


def test_weights_appear_where_a_task_has_them(tmp_path):
    step = preprocessors.PromptResponse(BYTE, "{text}:", "{text}")
    split = build(tmp_path, ["ab", "c"], step).split("train")
    assert BYTE.decode(split.tokens[split.weights > 0]) == "ab</s>c</s>"

    def some(example):
        tokens = np.arange(4)
        return {"tokens": tokens} if example["text"] == "a" else {
            "tokens": tokens, "weights": [0, 0, 0.5, 1]
        }  # fmt: skip

    split = build(tmp_path, ["a", "b", "a"], some).split("train")
    assert split.weights.tolist() == [1, 1, 1, 1, 0, 0, 0.5, 1, 1, 1, 1, 1]


def test_pairs(tmp_path):
    step = preprocessors.Preference(BYTE, prompt="{p}")
    source = sources.Examples([{"p": "x", "chosen": "good", "rejected": "no"}] * 2)
    cache = cache_builder.build_cache(tmp_path, "pairs", {"train": source}, step, BYTE)
    split = cache.split("train")
    assert split.parts == ("chosen", "rejected")
    assert (split.num_examples, split.num_documents) == (2, 4)
    assert BYTE.decode(split.document(3)) == "xno</s>"


def test_large_vocabularies_take_four_bytes(tmp_path):
    class Large(type(BYTE)):
        vocab_size = 70_000

    large = Large()
    step = lambda example: {"tokens": [69_999, 1]}  # noqa: E731
    source = {"train": sources.Examples([{"text": "x"}])}
    cache = cache_builder.build_cache(tmp_path, "large", source, step, large)
    assert cache.split("train").tokens.dtype == np.uint32
    assert cache.split("train").document(0).tolist() == [69_999, 1]


BAD_LINES = [b'{"text": "good"}', b'{"text": 3}', b"{", b'{"text": "also good"}']


def test_bad_records_are_refused_with_their_place(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(BAD_LINES))
    with pytest.raises(RecordError, match="x.jsonl:2: the field 'text' holds int, not text"):
        cache_builder.build_cache(tmp_path, "x", {"train": sources.JsonLines(path)}, LM, BYTE)
    assert [item.name for item in tmp_path.iterdir()] == ["x.jsonl"]


def test_bad_records_are_skipped_counted_and_listed(tmp_path, caplog):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(BAD_LINES + [b"null"] * 200))
    source = {"train": sources.JsonLines(path)}
    cache = cache_builder.build_cache(tmp_path, "x", source, LM, BYTE, on_bad="skip")
    bad = cache.bad_records("train")
    assert bad["count"] == 202
    assert [entry["where"] for entry in bad["first"][:3]] == [f"{path}:{n}" for n in (2, 3, 5)]
    assert len(bad["first"]) == 100
    assert cache.split("train").num_documents == 2
    assert "left out 202 bad records" in caplog.text
    with pytest.raises(DataError, match="on_bad is 'ignore'"):
        build(tmp_path, on_bad="ignore")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"tokens": [1, 259]}, "token 259 is not in 0..258"),
        ({"tokens": [-1, 2]}, "token -1 is not in 0..258"),
        ({"tokens": [0.5, 1]}, "not a list of token ids"),
        ({"ids": [1, 2]}, "gave no 'tokens'"),
        ({"tokens": [1, 2], "weights": [1]}, "weights of 'tokens' must be finite, one a token"),
        ({"tokens": [1, 2], "weights": [1, np.nan]}, "must be finite"),
        (ZeroDivisionError("oops"), "ZeroDivisionError: oops"),
    ],
)
def test_what_preprocessors_do_wrong(tmp_path, result, reason):
    def step(example):
        if example["text"] != "two two":
            return LM(example)
        if isinstance(result, Exception):
            raise result
        return result

    class Described:
        describe = staticmethod(lambda: "step")
        __call__ = staticmethod(step)

    with pytest.raises(RecordError, match=reason) as error:
        build(tmp_path, step=Described())
    assert error.value.where == "examples:1"
    assert not list(tmp_path.iterdir())


def test_an_empty_split_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"split 'train' is empty.*0 bad.*0 filtered, 2 empty"):
        build(tmp_path, ["", ""])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="split 'train' is empty"):
        source = {"train": sources.TextFiles(tmp_path / "empty.txt", "line")}
        cache_builder.build_cache(tmp_path, "x", source, LM, BYTE)


def test_indescribable_preprocessors_are_refused(tmp_path):
    unhashable = object()

    def step(example):
        return LM(example) if unhashable else None

    with pytest.raises(DataError, match="cannot be described for a recipe"):
        build(tmp_path, step=step)


@pytest.mark.parametrize("name", ["train.tokens", "train.offsets", "train.weights"])
def test_truncated_and_missing_files_are_refused(tmp_path, name):
    cache = build(tmp_path, step=preprocessors.PromptResponse(BYTE, "{text}", "{text}"))
    size = (cache.path / name).stat().st_size
    damage(cache, name, lambda data: data[:-1])
    with pytest.raises(CacheError, match=rf"{name} has {size - 1} bytes, but the manifest says"):
        cache_lib.open_cache(cache.path)
    (cache.path / name).unlink()
    with pytest.raises(CacheError, match=f"{name} is missing"):
        cache_lib.open_cache(cache.path)


def flip(at):
    def change(data):
        data[at] ^= 1
        return data

    return change


def test_flipped_bits_are_found(tmp_path):
    cache = build(tmp_path)
    path = damage(cache, "train.tokens", flip(3))
    cache_lib.open_cache(cache.path)
    with pytest.raises(CacheError, match="train.tokens: SHA-256 is"):
        cache_lib.open_cache(cache.path, verify_checksums=True)
    with pytest.raises(CacheError, match="train.tokens: SHA-256 is"):
        build(tmp_path)
    flip(3)(data := bytearray(path.read_bytes()))
    path.write_bytes(data)
    cache_lib.open_cache(cache.path, verify_checksums=True)
    damage(cache, "train.offsets", flip(15))
    with pytest.raises(CacheError, match="train.offsets: the offsets do not fit"):
        cache.split("train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-20], "manifest.json: not JSON"),
        (lambda data: b"[]", "no manifest of a token cache"),
        (lambda data: data.replace(b'"documents": 3', b'"documents": 2'), "its own checksum"),
        (lambda data: data.replace(b'"version": 1', b'"version": 9'), "version 9 of the cache"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path, change, message):
    cache = build(tmp_path)
    damage(cache, "manifest.json", change)
    with pytest.raises(CacheError, match=message):
        cache_lib.open_cache(cache.path)
    with pytest.raises(CacheError, match=message):
        build(tmp_path)
    shutil.rmtree(cache.path)
    build(tmp_path)


def test_missing_cache(tmp_path):
    with pytest.raises(CacheError, match="no token cache"):
        cache_lib.open_cache(tmp_path)


def test_a_builder_that_comes_second_keeps_the_first_folder(tmp_path):
    recipe = {"r": 1}

    def write(folder):
        writer = cache_builder.CacheWriter(folder, ("tokens",), 10, recipe)
        writer.write_split("train", [("x", {"tokens": [1, 2]})])
        writer.finish()

    def slow(folder):
        cache_builder.build_once(tmp_path, "c", recipe, write)  # another one finishes meanwhile
        (first,) = tmp_path.glob("c-*")
        (first / "mark").touch()
        write(folder)

    cache = cache_builder.build_once(tmp_path, "c", recipe, slow)
    assert (cache.path / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [cache.path.name]


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CacheError, match="demo-.* cannot be written: File too large"):
            build(tmp_path, ["x" * 100] * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    build(tmp_path, ["x" * 100] * 1000)


BUILDER = """
import json, sys
from jaxllm.data import *
root, kill = sys.argv[1], sys.argv[2] == "kill"
class Step:
    def describe(self): return "step"
    def __call__(self, example):
        if kill and example["text"] == "text 700":
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        return LanguageModeling(ByteTokenizer())(example)
source = Examples([{"text": f"text {i}"} for i in range(2000)])
cache = build_cache(root, "c", {"train": source}, Step(), ByteTokenizer())
cache.verify()
print(json.dumps([str(cache.path), cache.fingerprint()]))
"""


def test_builders_in_parallel_and_killed(tmp_path):
    def start(kind):
        return subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(tmp_path), kind],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    killed = start("kill")
    assert killed.wait() < 0
    assert not list(tmp_path.glob("c-*"))
    builders = [start("build") for _ in range(3)]
    results = [json.loads(builder.communicate()[0]) for builder in builders]
    assert all(builder.returncode == 0 for builder in builders)
    assert results[0] == results[1] == results[2]
    assert len(list(tmp_path.glob("c-*"))) == 1
