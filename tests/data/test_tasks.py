"""Tasks in seqio, and that nothing else needs seqio."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from jaxllm.data import cache_builder, preprocessors, seqio_build, sources, tasks
from jaxllm.data import tokenizers as tokenizers_lib
from jaxllm.data.errors import DataError

# One module stands for the code of a user who registers tasks of both kinds.
MODULE = '''
import functools
import seqio
import tensorflow as tf
from jaxllm.data import *

BYTE = ByteTokenizer()
RECORDS = [{"question": f"q{i}?", "answer": "é" * i, "level": i % 3} for i in range(20)]

def shorten(example):
    """Drops every third record."""
    return None if example["level"] == 2 else example

def accuracy(targets, predictions):
    return {"accuracy": sum(t == p for t, p in zip(targets, predictions)) / len(targets)}

def ours():
    steps = (shorten, PromptResponse(BYTE, "{question}", "{answer}"))
    source = Examples(RECORDS)
    return Task("ours", {"train": source}, steps, BYTE, (accuracy,))

def add():
    register(ours())
    lines = tf.data.Dataset.from_tensor_slices
    seqio.TaskRegistry.add(
        "foreign",
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: lines(
                {"inputs": ["a", "bc"], "targets": ["x", "yz"]}
            ),
            splits=["train"],
        ),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={
            "inputs": seqio.Feature(seqio.ByteVocabulary(), add_eos=False),
            "targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=True),
        },
    )
'''
REGISTRY = """
import user_tasks, seqio, numpy as np
from jaxllm.data import *
from jaxllm.data.tasks import seqio_vocabulary
import dataclasses

task = user_tasks.ours()
registered = register(task)
assert register(user_tasks.ours()) is registered
assert registered.metric_fns == [user_tasks.accuracy]
assert set(registered.output_features) == {"tokens", "weights"}
try:
    register(dataclasses.replace(task, on_bad="skip"))
except DataError as error:
    assert "already has a task 'ours' with another recipe" in str(error), error
else:
    raise AssertionError("another recipe was accepted")

register(dataclasses.replace(task, name="theirs"))
mixture = register_mixture("both", {"ours": 3.0, "theirs": 1.0})
assert register_mixture("both", {"ours": 3.0, "theirs": 1.0}) is mixture
assert mixture_rates("both") == {"ours": 3.0, "theirs": 1.0}
try:
    register_mixture("both", {"ours": 1.0, "theirs": 1.0})
except DataError as error:
    assert "other rates" in str(error)
else:
    raise AssertionError("other rates were accepted")

vocabulary = seqio_vocabulary(user_tasks.BYTE)
assert vocabulary.decode(vocabulary.encode("né")) == "né"
assert vocabulary.encode_tf("né").numpy().tolist() == vocabulary.encode("né")
assert vocabulary.decode_tf(vocabulary.encode_tf("né")).numpy().decode() == "né"

import tensorflow as tf
upper = to_seqio(lambda example: {"size": len(example["text"])}, {"size": ("int32", 0)})
data = tf.data.Dataset.from_tensor_slices({"text": ["é", "abc"]})
assert [int(x["size"]) for x in upper(data)] == [1, 3]
"""


needs_seqio = pytest.mark.skipif(
    importlib.util.find_spec("seqio") is None, reason="seqio is not installed"
)


@pytest.fixture(scope="module")
def user_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_tasks.py").write_text(MODULE)
    return folder


def run(script, *paths):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_seqio
def test_seqio_registry(user_module):
    run(REGISTRY, user_module)


@needs_seqio
def test_seqio_builds_what_the_direct_build_gives(user_module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(user_module))
    through = seqio_build.build_seqio_cache(tmp_path, "ours", "user_tasks:add")
    through.verify()
    byte = tokenizers_lib.load_tokenizer("byte")
    records = [{"question": f"q{i}?", "answer": "é" * i} for i in range(20) if i % 3 != 2]
    direct = cache_builder.build_cache(
        tmp_path,
        "direct",
        {"train": sources.Examples(records)},
        preprocessors.PromptResponse(byte, "{question}", "{answer}"),
        byte,
    )
    left, right = through.split("train"), direct.split("train")
    assert left.num_documents == right.num_documents == 13  # the empty answer is dropped
    np.testing.assert_array_equal(left.tokens, right.tokens)
    np.testing.assert_array_equal(left.offsets, right.offsets)
    np.testing.assert_array_equal(left.weights, right.weights)
    assert left.text_bytes == right.text_bytes
    assert through.vocab_size == direct.vocab_size
    # Opened again without a child process.
    monkeypatch.setattr(seqio_build.subprocess, "run", None)
    again = seqio_build.build_seqio_cache(tmp_path, "ours", "user_tasks:add")
    assert again.fingerprint() == through.fingerprint()


@needs_seqio
def test_a_foreign_task_with_inputs_and_targets(user_module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(user_module))
    cache = seqio_build.build_seqio_cache(tmp_path, "foreign", "user_tasks:add")
    split = cache.split("train")
    byte = tokenizers_lib.load_tokenizer("byte")
    assert [byte.decode(split.document(i)) for i in range(2)] == ["ax</s>", "bcyz</s>"]
    assert byte.decode(split.tokens[split.weights > 0]) == "x</s>yz</s>"


@needs_seqio
def test_failures_of_the_child_are_shown(user_module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(user_module))
    with pytest.raises(DataError, match="no_such_module"):
        seqio_build.build_seqio_cache(tmp_path, "ours", "no_such_module")
    with pytest.raises(DataError, match="(?s)the seqio task 'nothing' failed.*nothing"):
        seqio_build.build_seqio_cache(tmp_path, "nothing", "user_tasks:add")
    assert not list(tmp_path.iterdir())


def test_a_task_builds_directly(tmp_path):
    byte = tokenizers_lib.load_tokenizer("byte")
    source = {"train": sources.Examples([{"text": "ab"}])}
    task = tasks.Task("demo", source, (preprocessors.LanguageModeling(byte),), byte)
    assert byte.decode(task.build(tmp_path).split("train").document(0)) == "ab</s>"


NO_TENSORFLOW = """
import sys
import numpy as np
import jaxllm
import jaxllm.data as data
heavy = {"tensorflow", "seqio", "tensorflow_datasets", "datasets", "jax", "transformers", "torch"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)

byte = data.load_tokenizer("byte")
source = data.Examples([{"text": "some text"}] * 8)
cache = data.build_cache(sys.argv[1], "x", {"train": source}, data.LanguageModeling(byte), byte)
loader = data.Loader(data.PackedRows(cache.split("train"), 4), 2)
with loader.iterator() as batches:
    next(batches)
heavy -= {"jax"}  # grain imports it
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert "jax" not in sys.modules or not sys.modules["jax"]._src.xla_bridge._backends
"""


def test_no_tensorflow_and_no_device_in_a_fresh_process(tmp_path):
    run(NO_TENSORFLOW.replace("sys.argv[1]", repr(str(tmp_path))))
