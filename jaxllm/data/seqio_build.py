"""Token caches from tasks registered in seqio, built in a process of their own.

    cache = build_seqio_cache("caches", "c4_en", register="my_package.tasks")

seqio brings TensorFlow (about 5 s and 800 MB): the child process imports it, writes the cache and
ends, and the training process never loads it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxllm.data.cache import TokenCache
from jaxllm.data.cache_builder import CacheWriter, build_once
from jaxllm.data.errors import DataError
from jaxllm.data.files import sha256_file
from jaxllm.data.preprocessors import Example


def build_seqio_cache(
    root: str | os.PathLike[str],
    task: str,
    register: str,
    *,
    splits: Sequence[str] = ("train",),
    version: str = "",
) -> TokenCache:
    """Opens the cache of a seqio task, building it in a child process where it is not there.

    A task with features "inputs" and "targets" gives documents of both in a row with loss on the
    targets; with "targets" alone, or "tokens" (and "weights"), documents as they are; with
    "chosen" and "rejected", pairs.

    Args:
      root: folder of caches.
      task: name of the task.
      register: what registers it: "package.module", or "package.module:function" to call.
      splits: which to build.
      version: change it when the data behind the task change: what foreign code reads is not
        part of the recipe's hash, only the text of the registering module, the versions of
        seqio and TensorFlow, and this.

    Raises:
      DataError: the child failed; the end of its output is in the message.
    """
    recipe = {
        "seqio task": task,
        "register": register,
        "module": _module_hash(register.partition(":")[0]),
        "splits": list(splits),
        "version": version,
        "versions": {name: importlib.metadata.version(name) for name in ("seqio", "tensorflow")},
    }

    def write(folder: pathlib.Path) -> None:
        order = {
            "folder": str(folder),
            "task": task,
            "register": register,
            "splits": list(splits),
            "recipe": recipe,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "-1",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        done = subprocess.run(
            [sys.executable, "-c", "from jaxllm.data import seqio_build; seqio_build.run_child()"],
            input=json.dumps(order),
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            tail = "\n".join(done.stderr.strip().splitlines()[-15:])
            raise DataError(f"building the cache of the seqio task {task!r} failed:\n{tail}")

    return build_once(root, task.replace(":", "_"), recipe, write)


def _module_hash(name: str) -> str:
    """Hash of a module's text, without importing it or its packages."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise DataError(f"no module {name!r} to register the task")
    candidates = [pathlib.Path(spec.origin)] if spec.origin and not rest else []
    for place in spec.submodule_search_locations or ():
        path = pathlib.Path(place).joinpath(*rest)
        candidates += [path.with_suffix(".py"), path / "__init__.py"]
    for candidate in candidates:
        if candidate.is_file():
            return sha256_file(candidate)
    raise DataError(f"no source file of the module {name!r} that registers the task")


def _examples(task: Any, split: str, names: frozenset[str]) -> Iterator[tuple[str, Example]]:
    dataset = task.get_dataset(sequence_length=None, split=split, shuffle=False)
    for i, example in enumerate(dataset.as_numpy_iterator()):
        where = f"{task.name}[{split}]:{i}"
        if "targets" not in names:
            yield where, dict(example)
            continue
        targets = example["targets"]
        if "inputs" not in names:
            yield where, {"tokens": targets}
            continue
        inputs = example["inputs"]
        weights = np.repeat(np.array([0, 1], np.float32), [len(inputs), len(targets)])
        yield where, {"tokens": np.concatenate([inputs, targets]), "weights": weights}


def run_child() -> None:
    """What the child process does: reads its order from standard input and writes the cache."""
    order = json.load(sys.stdin)
    import seqio

    module, _, function = order["register"].partition(":")
    loaded = importlib.import_module(module)
    if function:
        getattr(loaded, function)()
    if order["task"] in seqio.MixtureRegistry.names():
        raise DataError(f"{order['task']} is a mixture: build its tasks, then mix their rows")
    task = seqio.TaskRegistry.get(order["task"])
    names = frozenset(task.output_features)
    parts: tuple[str, ...]
    if {"chosen", "rejected"} <= names:
        parts, main = ("chosen", "rejected"), "chosen"
    elif names & {"targets", "tokens"}:
        parts, main = ("tokens",), "targets" if "targets" in names else "tokens"
    else:
        raise DataError(
            f"the features {sorted(names)} are no token sequences that can be cached; expected "
            "'targets', 'tokens', or 'chosen' and 'rejected'"
        )
    vocab_size = task.output_features[main].vocabulary.vocab_size
    writer = CacheWriter(pathlib.Path(order["folder"]), parts, vocab_size, order["recipe"])
    for split in order["splits"]:
        writer.write_split(split, _examples(task, split, names))
    writer.finish()
