"""Serving batches by step.

    loader = Loader(rows, batch_size=64, seed=0, process_index=jax.process_index(),
                    process_count=jax.process_count())
    with loader.iterator(start_step=100) as batches:
        for batch in batches: ...

Batch `step` holds rows step * batch_size ... of the endless sequence of rows, and each process
its contiguous block of them: any number of processes sees the same global batches in the same
order, and the whole state of the pipeline is one integer, the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxllm.data.errors import DataError
from jaxllm.data.rows import Batch, Rows

_FOREVER = 1 << 62


class Loader:
    """Batches of rows, by step.

    Args:
      rows: PackedRows, PartRows, ZippedRows or a Mixture.
      batch_size: rows of the global batch; divisible by `process_count`.
      seed: of all permutations.
      process_index, process_count: this process's place; pass jax.process_index() and
        jax.process_count() in a run of several.
      prefetch: batches that `iterator` prepares ahead in a thread; 0 for none.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        seed: int = 0,
        *,
        process_index: int = 0,
        process_count: int = 1,
        prefetch: int = 2,
    ):
        if batch_size < 1 or process_count < 1 or batch_size % process_count:
            raise DataError(
                f"batch_size is {batch_size}; expected a positive multiple of the "
                f"{process_count} processes"
            )
        if not 0 <= process_index < process_count:
            raise DataError(f"process_index is {process_index}, of {process_count} processes")
        if prefetch < 0:
            raise DataError(f"prefetch is {prefetch}; expected 0 or more")
        if not 0 <= seed < 1 << 63:
            raise DataError(f"seed is {seed}; expected 0 to 2**63 - 1")
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.process_index = process_index
        self.process_count = process_count
        self._prefetch = prefetch

    @property
    def local_batch_size(self) -> int:
        """Rows of this process's block."""
        return self.batch_size // self.process_count

    @property
    def tokens_per_batch(self) -> int:
        """Positions of the global batch, padding included."""
        return self.batch_size * self.rows.row_length

    def batch(self, step: int) -> Batch:
        """This process's block of batch `step`; arrays are [local_batch_size, T]."""
        if step < 0:
            raise DataError(f"step is {step}; expected 0 or more")
        return self.rows.take(self.seed, self._block(step))

    def iterator(self, start_step: int = 0) -> BatchIterator:
        """Batches from `start_step` on, without end, prepared ahead by a thread of grain's."""
        return BatchIterator(self, start_step, self._prefetch)

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Batches in which an epoch's rows are used up, rounded up."""
        return -(-self.rows.num_rows(self.seed, epoch) // self.batch_size)

    def epochs(self, step: int) -> dict[str, float]:
        """How often the data of each source has been seen before batch `step`."""
        return self.rows.epochs(self.seed, step * self.batch_size)

    def describe(self, step: int) -> str:
        """Where the rows of batch `step` stand in the data, for messages."""
        first = step * self.batch_size
        seen = ", ".join(f"{epoch:.3f} of {name}" for name, epoch in self.epochs(step).items())
        return f"rows {first} to {first + self.batch_size - 1}, epoch {seen}"

    def eval_batches(self) -> Iterator[Batch]:
        """Every row of epoch 0 once, in order; the last batch is filled up with empty rows.

        Empty rows are zero throughout, so their weights add nothing. Every process gets the same
        number of batches. Use rows without shuffling to get the order of the data.
        """
        count = self.rows.num_rows(self.seed, 0)
        for step in range(self.steps_per_epoch(0)):
            index = self._block(step)
            batch = self.rows.take(self.seed, np.minimum(index, count - 1))
            yield batch if index[-1] < count else _blank(batch, index >= count)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a resumed run to see the same batches; JSON-safe.

        The number of processes is not part of it: any number gives the same global batches.
        """
        return {"seed": self.seed, "batch_size": self.batch_size, "rows": self.rows.fingerprint()}

    def _block(self, step: int) -> np.ndarray:
        first = step * self.batch_size + self.process_index * self.local_batch_size
        return np.arange(first, first + self.local_batch_size)


class BatchIterator:
    """Endless iterator over a loader's batches; a context manager that stops its thread."""

    def __init__(self, loader: Loader, start_step: int, prefetch: int):
        import grain

        if start_step < 0:
            raise DataError(f"start_step is {start_step}; expected 0 or more")
        options = grain.ReadOptions(
            num_threads=1 if prefetch else 0, prefetch_buffer_size=max(prefetch, 0)
        )
        dataset = grain.MapDataset.source(_Steps(loader)).to_iter_dataset(options)
        self._iterator = iter(dataset)
        self._iterator.set_state({"next_index": start_step})
        self._step = start_step

    @property
    def step(self) -> int:
        """Step of the batch that comes next: the state to save."""
        return self._step

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._step += 1
        return batch

    def close(self) -> None:
        """Stops the prefetching thread."""
        self._iterator.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()


class _Steps:
    """Random access to a loader's batches, in the form that grain reads."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def __len__(self) -> int:
        return _FOREVER

    def __getitem__(self, step: int) -> Batch:
        return self._loader.batch(step)


def check_fingerprint(
    saved: Mapping[str, Any], current: Mapping[str, Any], name: str = "data"
) -> None:
    """Refuses to resume on other data than a checkpoint was trained on.

    Raises:
      DataError: naming the first field that differs, with both values.
    """
    for key in sorted({*saved, *current}):
        here = f"{name}.{key}"
        if key not in saved or key not in current:
            where = "this run" if key in saved else "the checkpoint"
            raise DataError(f"{here} is missing in {where}; the runs do not see the same data")
        if isinstance(saved[key], Mapping) and isinstance(current[key], Mapping):
            check_fingerprint(saved[key], current[key], here)
        elif saved[key] != current[key]:
            raise DataError(
                f"{here} is {current[key]!r}, but the checkpoint was trained with {saved[key]!r}; "
                "restore the setting or start a new run"
            )


def _blank(batch: Batch, empty: np.ndarray) -> Batch:
    result = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            result[name] = _blank(value, empty)
        else:
            result[name] = np.where(empty[:, None], np.zeros_like(value), value)
    return result
