"""Checkpoints of a run: the state, the position in the data, and what must be the same on resume.

A thin layer over orbax: saved in the background, made visible by a rename, the newest n kept. The
data position is one integer, because batches are a pure function of the step; a fingerprint
(dataset, seed, batch size, ...) is stored beside it and compared on resume, so that a run never
goes on with other data than it began with. A manifest of the parameters' containers stands there
too, because orbax saves arrays only (`jaxllm.models.manifest`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxllm.models import manifest
from jaxllm.training.state import TrainState

_log = logging.getLogger(__name__)
_NOTES = ("data", "fingerprint", "manifest", "extra")
# Troubles of the machine, not of the files: another attempt may succeed.
_PASSING = re.compile(
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED|Too many open files"
)


class CheckpointError(ValueError):
    """A checkpoint that does not fit the run, or that cannot be read or written."""


class DamagedError(CheckpointError):
    """A checkpoint that is truncated, incomplete or corrupt."""


class WriteError(CheckpointError):
    """A checkpoint that could not be written: the disk is full, or not to be written on."""


class Checkpoints:
    """Saves and restores the states of one run.

    Args:
      folder: created if missing.
      keep: how many of the newest checkpoints stay; None = all.
      fingerprint: what identifies the data (and anything else that must not change), JSON-safe.
      asynchronous: write in the background.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 2,
        fingerprint: Mapping[str, Any] | None = None,
        asynchronous: bool = True,
    ):
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} must be at least 1, or None for all.")
        self.folder = pathlib.Path(folder).absolute()
        self._fingerprint = _jsonable(fingerprint or {})
        self._handlers: dict[str, Any] = {name: ocp.JsonCheckpointHandler() for name in _NOTES}
        self._handlers["state"] = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers=self._handlers,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=asynchronous,
                cleanup_tmp_directories=True,
            ),
        )
        self._under_way = False

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> None:
        """Saves the state under its step; returns when the state may be changed, and writes on.

        Args:
          state: what to save.
          extra: JSON-safe values that the caller wants back.

        Raises:
          WriteError: this one, or the one before, cannot be written.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        self.wait()
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave({"next_index": step}),
            fingerprint=ocp.args.JsonSave(self._fingerprint),
            manifest=ocp.args.JsonSave(manifest.describe(state.params)),
            extra=ocp.args.JsonSave(_jsonable(extra or {})),
        )
        self._write(lambda: self._manager.save(step, args=args, force=True))
        self._under_way = True

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def restore(
        self, target: TrainState, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint onto the shardings of `target`, whatever mesh it was saved from.

        Args:
          target: a state, or the `ShapeDtypeStruct`s of one (`state.abstract_state`).
          step: which; None = the newest.

        Returns:
          The state, and the `extra` it was saved with.

        Raises:
          CheckpointError: there is none, its parameters do not fit the target, or its fingerprint
            differs (naming the field).
          DamagedError: it cannot be read.
        """
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.folder}.")
        where = self.folder / str(step)
        if step not in self._manager.all_steps():
            raise CheckpointError(f"no checkpoint {where}: there are {self.steps()}.")
        notes = {name: self._read(where, name, ocp.args.JsonRestore()) for name in _NOTES}
        self._compare_fingerprint(where, notes["fingerprint"])
        try:
            manifest.check(notes["manifest"], target.params)
        except ValueError as error:
            raise CheckpointError(f"checkpoint {where} is of another model: {error}") from error
        abstract = jax.tree.map(_abstract, target)
        self._compare_shapes(where, step, abstract)
        state = self._read(where, "state", ocp.args.StandardRestore(abstract))
        if int(state.step) != notes["data"]["next_index"]:
            raise DamagedError(
                f"{where}: the state is of step {int(state.step)}, but the data stand at "
                f"{notes['data']['next_index']}."
            )
        return state, notes["extra"]

    def resume(self, target: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """As `restore`, from the newest checkpoint that can be read; None if there is none at all.

        Damaged ones newer than that are set aside as `damaged-STEP`, with a warning. With several
        processes, one that cannot be read by any of them is damaged.

        Raises:
          CheckpointError: a checkpoint that can be read does not fit the run; or all are damaged,
            of which none is set aside then.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            restored, reason = None, ""
            try:
                restored = self.restore(target, step)
            except DamagedError as error:
                reason = str(error)
            if _on_any_process(restored is None):
                damaged[step] = (
                    reason
                    or f"checkpoint {self.folder / str(step)} cannot be read by another process."
                )
                continue
            if damaged:
                self._set_aside(damaged, step)
            return restored
        if damaged:
            found = " ".join(damaged.values())
            raise DamagedError(
                f"no checkpoint in {self.folder} can be read: {found} Repair one of them, or move "
                "that folder away to start anew."
            )
        return None

    def check(self) -> None:
        """Raises WriteError if the write in the background has failed; does not wait for it."""
        if self._under_way and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when everything saved is on disk.

        Raises:
          WriteError: it cannot be written.
        """
        if self._under_way:
            self._write(self._manager.wait_until_finished)
            self._under_way = False

    def close(self) -> None:
        """Waits and frees the background threads.

        Raises:
          WriteError: the last one cannot be written, and nobody has been told so yet.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def _write(self, action: Callable[[], Any]) -> None:
        """Turns what the system refuses to write into an error that says where and why."""
        try:
            action()
            return
        except Exception as error:
            reason = _refusal(error)
            if reason is None:
                raise
        # Without the cause, whose long traceback orbax has logged.
        self._under_way = False
        last = self.latest_step()
        kept = "There is no good one" if last is None else f"The last good one is {last}"
        raise WriteError(
            f"cannot write a checkpoint into {self.folder}: {reason} "
            f"({shutil.disk_usage(self.folder).free / 1e9:.2f} GB are free there). {kept}."
        )

    def _set_aside(self, damaged: Mapping[int, str], good: int) -> None:
        """Renames damaged checkpoints, so that their steps can be saved again."""
        if jax.process_index() == 0:
            moved = []
            for step, reason in damaged.items():
                names = (f"damaged-{step}" + (f".{i}" if i else "") for i in itertools.count())
                aside = next(path for name in names if not (path := self.folder / name).exists())
                (self.folder / str(step)).rename(aside)
                moved.append(f"{reason} It is set aside as {aside.name}.")
            _log.warning(
                "%s Going on from checkpoint %s.", " ".join(moved), self.folder / str(good)
            )
        _on_any_process(False)  # no process looks before the renames are done
        self._manager.reload()

    def _read(self, where: pathlib.Path, name: str, args: Any) -> Any:
        """One item, read by this process alone: the manager would have all wait for all, also for
        those that fail.
        """
        with self._naming(where, name):
            return self._handlers[name].restore(
                self._manager.directory / where.name / name, args=args
            )

    @contextlib.contextmanager
    def _naming(self, where: pathlib.Path, what: str) -> Iterator[None]:
        """Turns whatever orbax raises about a damaged file into an error that names the
        checkpoint.
        """
        try:
            yield
        except Exception as error:
            passing = isinstance(error, MemoryError | PermissionError) or _PASSING.search(
                str(error)
            )
            kind = CheckpointError if passing else DamagedError
            raise kind(f"cannot read {what} of checkpoint {where}: {_reason(error)}.") from error

    def _compare_fingerprint(self, where: pathlib.Path, saved: Mapping[str, Any]) -> None:
        saved, current = _flatten(saved), _flatten(self._fingerprint)
        for name in sorted({*saved, *current}):
            before, now = saved.get(name), current.get(name)
            if before != now:
                raise CheckpointError(
                    f"{where} was saved with {name}={before!r}, this run has {name}={now!r}: the "
                    "batches would differ. Use the same value, or another workdir."
                )

    def _compare_shapes(self, where: pathlib.Path, step: int, target: TrainState) -> None:
        """Refuses other parameters by name, before orbax fails on (or silently pads) an array."""
        with self._naming(where, "the description of the state"):
            metadata = self._manager.item_metadata(step)["state"]
            tree = metadata.tree if hasattr(metadata, "tree") else metadata
            saved = {_names(path): leaf for path, leaf in _leaves(tree)}
            if not saved:
                raise FileNotFoundError(f"{where / 'state'} describes no arrays")
        wanted = {_names(path): leaf for path, leaf in _leaves(target)}
        for what, names in (
            ("lacks", sorted(set(wanted) - set(saved))),
            ("has the unexpected", sorted(set(saved) - set(wanted))),
        ):
            if names:
                shown = ", ".join("/".join(n) for n in names[:3])
                raise CheckpointError(
                    f"checkpoint {where} {what} {shown} ({len(names)} in all): it is of another "
                    "model or optimizer."
                )
        for name, leaf in wanted.items():
            shape, dtype = tuple(saved[name].shape), saved[name].dtype
            if shape != leaf.shape or dtype != leaf.dtype:
                raise CheckpointError(
                    f"checkpoint {where}: {'/'.join(name)} is {dtype}{list(shape)}, expected "
                    f"{leaf.dtype}{list(leaf.shape)}."
                )


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path, leaf) for path, leaf in leaves if hasattr(leaf, "shape")]


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Keys of a path as text: the same for a dictionary, a field and a place in a tuple."""
    return tuple(
        str(next(getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)))
        for key in path
    )


def _jsonable(value: Any) -> Any:
    """What JSON makes of a value: tuples become lists."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be stored as JSON.")


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping)
        flat |= _flatten(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


def _reason(error: BaseException) -> str:
    """One line about an error, by the first cause of it."""
    error = _first(error)
    text = str(error).partition(" [")[0].strip()
    line = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:400].rstrip(".")
    return _refusal(error) or line


def _refusal(error: BaseException) -> str | None:
    """What the operating system said, if the first cause is an error of its."""
    error = _first(error)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # as tensorstore puts it
    if code:
        return os.strerror(int(code[1]))
    return error.strerror if isinstance(error, OSError) else None


def _first(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _on_any_process(value: bool) -> bool:
    """Whether a value is true on any process; a meeting point of all of them."""
    if jax.process_count() == 1:
        return value
    return bool(np.any(multihost_utils.process_allgather(np.asarray(value))))
