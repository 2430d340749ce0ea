"""Checkpoints of a run: the state, the position in the data, and what must be the same on resume.

A thin layer over orbax: saved in the background, made visible by a rename, the newest n kept. The
  data
position is one integer, because batches are a pure function of the step; a fingerprint (dataset,
seed, batch size, ...) is stored beside it and compared on resume, so that a run never goes on with
other data than it began with. A manifest of the parameters' containers stands there too, because
orbax saves arrays only (`jaxllm.models.manifest`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxllm.models import manifest
from jaxllm.training.state import TrainState

_NOTES = ("data", "fingerprint", "manifest", "extra")


class CheckpointError(ValueError):
    """A checkpoint that does not fit the run, or that cannot be read."""


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
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                **{name: ocp.JsonCheckpointHandler() for name in _NOTES},
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=asynchronous,
                cleanup_tmp_directories=True,
            ),
        )

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> None:
        """Saves the state under its step; returns when the state may be changed, and writes on.

        Args:
          state: what to save.
          extra: JSON-safe values that the caller wants back.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=ocp.args.JsonSave({"next_index": step}),
                fingerprint=ocp.args.JsonSave(self._fingerprint),
                manifest=ocp.args.JsonSave(manifest.describe(state.params)),
                extra=ocp.args.JsonSave(_jsonable(extra or {})),
            ),
            force=True,
        )

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
          CheckpointError: there is none, it cannot be read, its parameters do not fit the target,
            or its fingerprint differs (naming the field).
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.folder}.")
        where = self.folder / str(step)
        if step not in self._manager.all_steps():
            raise CheckpointError(f"no checkpoint {where}: there are {self.steps()}.")
        notes = self._read(where, step, {name: ocp.args.JsonRestore() for name in _NOTES})
        self._compare_fingerprint(where, notes.fingerprint)
        try:
            manifest.check(notes.manifest, target.params)
        except ValueError as error:
            raise CheckpointError(f"checkpoint {where} is of another model: {error}") from error
        abstract = jax.tree.map(_abstract, target)
        self._compare_shapes(where, step, abstract)
        state = self._read(where, step, {"state": ocp.args.StandardRestore(abstract)}).state
        if int(state.step) != notes.data["next_index"]:
            raise CheckpointError(
                f"{where}: the state is of step {int(state.step)}, but the data stand at "
                f"{notes.data['next_index']}."
            )
        return state, notes.extra

    def wait(self) -> None:
        """Returns when everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and frees the background threads."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _read(self, where: pathlib.Path, step: int, items: Mapping[str, Any]) -> Any:
        with self._naming(where, " and ".join(items)):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _naming(self, where: pathlib.Path, what: str) -> Iterator[None]:
        """Turns whatever orbax raises about a damaged file into an error that names the
        checkpoint.
        """
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"cannot read {what} of checkpoint {where}: {_first_line(error)}. If it is "
                f"damaged, remove that folder to go on from the one before ({self.steps()})."
            ) from error

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


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
