"""Tasks: source, preprocessors, output features and metrics under one name, also for seqio.

A `Task` describes a data set. `task.build(root)` makes its token cache directly, without
TensorFlow; `register(task)` puts it into seqio's registry for seqio's own tools; and a task that
other code registered in seqio, with TensorFlow preprocessors, becomes a cache of the same form by
`jaxllm.data.seqio_build.build_seqio_cache`. seqio and TensorFlow are imported inside the
functions that need them, nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.data.cache import TokenCache
from jaxllm.data.cache_builder import build_cache
from jaxllm.data.describe import describe
from jaxllm.data.errors import DataError, RecordError
from jaxllm.data.files import sha256_json
from jaxllm.data.preprocessors import Example, Preprocessor
from jaxllm.data.sources import BadRecord, Source
from jaxllm.data.tokenizers import Tokenizer

Features = Mapping[str, tuple[str, int]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set.

    Attributes:
      name: letters, digits, `_`, `.`, `:`.
      splits: source of each split.
      preprocessors: a chain for all splits; the last gives token sequences.
      tokenizer: the one that the preprocessors use.
      metrics: functions `(targets, predictions)` or `(targets, scores)` -> {name: value}, the
        signatures of seqio's `metric_fns`, called with lists over all examples.
      on_bad: "refuse" or "skip" bad records.
    """

    name: str
    splits: Mapping[str, Source]
    preprocessors: Sequence[Preprocessor]
    tokenizer: Tokenizer
    metrics: tuple[Callable[..., Mapping[str, Any]], ...] = ()
    on_bad: str = "refuse"

    def build(self, root: str | os.PathLike[str], progress: bool | None = None) -> TokenCache:
        """Opens or builds the token cache below `root`; see `cache_builder.build_cache`."""
        return build_cache(
            root,
            self.name,
            self.splits,
            self.preprocessors,
            self.tokenizer,
            on_bad=self.on_bad,
            progress=progress,
        )

    def recipe_hash(self) -> str:
        """Hash of everything that the data depend on."""
        values = [self.splits, self.preprocessors, self.tokenizer, self.on_bad]
        return sha256_json([describe(value) for value in values])


def register(task: Task) -> Any:
    """Registers a task in seqio; again with the same recipe, gives the registered one.

    Returns:
      the `seqio.Task`; its features are those of the last preprocessor, not trimmed or padded.

    Raises:
      DataError: the name belongs to a task with another recipe.
    """
    import seqio
    import tensorflow as tf

    recipe = task.recipe_hash()
    if task.name in seqio.TaskRegistry.names():
        known = seqio.TaskRegistry.get(task.name)
        if getattr(getattr(known.source, "_dataset_fn", None), "recipe", None) != recipe:
            raise DataError(f"seqio already has a task {task.name!r} with another recipe")
        return known

    def dataset(split: str, shuffle_files: bool = False, seed: int | None = None) -> Any:
        del shuffle_files, seed  # rows are shuffled when they are planned
        source = task.splits[split]
        spec = {"record": tf.TensorSpec([], tf.string)}
        return tf.data.Dataset.from_generator(
            lambda: _json_records(source, task.on_bad), output_signature=spec
        )

    dataset.recipe = recipe  # type: ignore[attr-defined]
    features: Features = task.preprocessors[-1].features  # type: ignore[attr-defined]
    return seqio.TaskRegistry.add(
        task.name,
        source=seqio.FunctionDataSource(dataset, splits=tuple(task.splits)),
        preprocessors=[to_seqio(_Chain(tuple(task.preprocessors)), features)],
        output_features=_output_features(task, features),
        metric_fns=list(task.metrics),
    )


def register_mixture(name: str, rates: Mapping[str, float]) -> Any:
    """Registers a seqio mixture of registered tasks; again with the same rates, gives that one.

    Raises:
      DataError: the name belongs to a mixture with other rates.
    """
    import seqio

    if name in seqio.MixtureRegistry.names():
        if mixture_rates(name) != {task: float(rate) for task, rate in rates.items()}:
            raise DataError(f"seqio already has a mixture {name!r} with other rates")
        return seqio.MixtureRegistry.get(name)
    return seqio.MixtureRegistry.add(name, list(rates.items()))


def mixture_rates(name: str) -> dict[str, float]:
    """Rate of each task of a seqio mixture, for `jaxllm.data.Mixture`.

    seqio draws examples at these rates, `Mixture` packed rows.
    """
    import seqio

    mixture = seqio.MixtureRegistry.get(name)
    return {task.name: float(mixture.get_rate(task)) for task in mixture.tasks}


def to_seqio(preprocessor: Preprocessor, features: Features | None = None) -> Callable[..., Any]:
    """Lifts a function `example -> example | None` to one from tf.data dataset to dataset.

    Args:
      preprocessor: gets Python and NumPy values (strings as str); None drops the example.
      features: dtype and rank of each output, {"tokens": ("int32", 1)}; default: the
        preprocessor's own `features`.
    """
    if features is None:
        features = getattr(preprocessor, "features", None)
        if features is None:
            raise DataError(f"{preprocessor!r} has no `features`: give dtype and rank of each")
    outputs = dict(features)

    def lifted(dataset: Any) -> Any:
        import tensorflow as tf

        inputs = sorted(dataset.element_spec)

        def call(*values: Any) -> list[np.ndarray]:
            example = {name: _python(value) for name, value in zip(inputs, values, strict=True)}
            result = preprocessor(example)
            if result is None:
                empty = [np.zeros([0] * rank, dtype) for dtype, rank in outputs.values()]
                return [np.array(False), *empty]
            arrays = [np.asarray(result[name], dtype) for name, (dtype, _) in outputs.items()]
            return [np.array(True), *arrays]

        dtypes = [tf.bool, *(tf.as_dtype(dtype) for dtype, _ in outputs.values())]

        def mapped(example: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            keep, *arrays = tf.numpy_function(call, [example[name] for name in inputs], dtypes)
            keep.set_shape([])
            for array, (_, rank) in zip(arrays, outputs.values(), strict=True):
                array.set_shape([None] * rank)
            return keep, dict(zip(outputs, arrays, strict=True))

        return (
            dataset.map(mapped, num_parallel_calls=tf.data.AUTOTUNE)
            .filter(lambda keep, example: keep)
            .map(lambda keep, example: example)
        )

    return lifted


def seqio_vocabulary(tokenizer: Tokenizer) -> Any:
    """A `seqio.Vocabulary` around a tokenizer. seqio takes 0 for padding, whatever it means."""
    import seqio
    import tensorflow as tf

    class TokenizerVocabulary(seqio.Vocabulary):
        @property
        def bos_id(self) -> int | None:
            return tokenizer.bos_id

        @property
        def eos_id(self) -> int | None:
            return tokenizer.eos_id

        @property
        def unk_id(self) -> int | None:
            return None

        @property
        def _base_vocab_size(self) -> int:
            return tokenizer.vocab_size

        def _encode(self, s: str) -> list[int]:
            return tokenizer.encode(s)

        def _decode(self, ids: Sequence[int]) -> str:
            return tokenizer.decode(ids)

        def _encode_tf(self, s: Any) -> Any:
            def encode(text: Any) -> np.ndarray:
                return np.asarray(tokenizer.encode(_python(text)), np.int32)

            ids = tf.numpy_function(encode, [s], tf.int32)
            ids.set_shape([None])
            return ids

        def _decode_tf(self, ids: Any) -> Any:
            text = tf.numpy_function(lambda i: tokenizer.decode(i).encode(), [ids], tf.string)
            text.set_shape([])
            return text

    return TokenizerVocabulary()


@dataclasses.dataclass(frozen=True)
class _Chain:
    """The preprocessors of a task behind one another, from a record in JSON."""

    steps: tuple[Preprocessor, ...]

    def __call__(self, example: Example) -> Example | None:
        current: Example | None = json.loads(example["record"])
        for step in self.steps:
            if current is None:
                return None
            current = step(current)
        return current


def _json_records(source: Source, on_bad: str) -> Any:
    for record in source.records():
        if not isinstance(record, BadRecord):
            yield {"record": json.dumps(record.value)}
        elif on_bad == "refuse":
            raise RecordError(record.where, record.reason)


def _output_features(task: Task, features: Features) -> dict[str, Any]:
    import seqio
    import tensorflow as tf

    vocabulary = seqio_vocabulary(task.tokenizer)
    result = {}
    for name, (dtype, rank) in features.items():
        if rank == 0:
            continue  # such as the size in bytes: passed on, but no feature of a model
        tokens = dtype.startswith("int")
        result[name] = seqio.Feature(
            vocabulary if tokens else seqio.PassThroughVocabulary(0),
            add_eos=False,
            dtype=tf.as_dtype(dtype),
            rank=rank,
        )
    return result


def _python(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, list):
        return [_python(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        # TensorFlow hands strings over as bytes; run eagerly, as arrays of bytes or str.
        return _python(value.tolist())
    return value
