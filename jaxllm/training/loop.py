"""The training loop: batches in, metrics and checkpoints out, and the same end after an
interruption.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import optax
from jax.sharding import Mesh

from jaxllm.models import parameters
from jaxllm.training import (
    checkpoints,
    interrupt,
    optimizers,
    partition,
    profiling,
    progress,
    sharding,
    writers,
)
from jaxllm.training import metrics as metrics_lib
from jaxllm.training.metrics import Mean
from jaxllm.training.state import TrainState, abstract_state, create_state
from jaxllm.training.step import Loss, make_train_step


class Loader(Protocol):
    """Where batches come from: `jaxllm.data.Loader`, or anything with these two methods."""

    def iterator(self, start_step: int = 0) -> Iterator[Mapping[str, Any]]:
        """This process's batches from a step on; batch i depends on i alone."""

    def fingerprint(self) -> Mapping[str, Any]:
        """What the batches depend on, JSON-safe; compared on resume."""

    # Optional: describe(step: int) -> str, which says what data batch `step` holds.


class NonFiniteError(FloatingPointError):
    """The loss or its gradient became NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long, and how often.

    Attributes:
      steps: number of optimizer steps of the whole run.
      log_every: steps between lines of metrics (means over the steps between); 0 = never.
      eval_every: steps between evaluations (also one at the end); 0 = never.
      checkpoint_every: steps between checkpoints (also one at the end); 0 = only at the end.
      keep: how many checkpoints stay; None = all.
      accumulate: microbatches a step.
      ema_decay: decay of the moving average of the parameters; None = no average.
      seed: of all randomness in the step (dropout, noise).
      skip_nonfinite: how many steps in a row may have a loss or gradient that is not finite. Such a
        step changes nothing but the step count (the optimizer's schedule waits), and is left out of
        the means; "train/skipped" counts them. One more in a row ends the run.
      progress: show a progress bar with the time left.
      tensorboard: also write TensorBoard events.
      peak_flops: operations a second of all devices together; None = from the table by device kind.
    """

    steps: int
    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0
    keep: int | None = 2
    accumulate: int = 1
    ema_decay: float | None = None
    seed: int = 0
    skip_nonfinite: int = 0
    progress: bool = True
    tensorboard: bool = True
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("log_every", 0),
            ("eval_every", 0),
            ("checkpoint_every", 0),
            ("accumulate", 1),
            ("skip_nonfinite", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"loop.{name}={value} must be at least {least}.")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"loop.ema_decay={self.ema_decay} must lie in [0, 1), or be None.")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      state: the last state.
      metrics: the last logged training metrics, by name without prefix.
      evaluation: the last evaluation.
      interrupted: it was asked to end early (SIGTERM) and has saved; the same call goes on from
        there.
    """

    state: TrainState
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    interrupted: bool


def train(
    config: LoopConfig,
    *,
    loss: Loss,
    params: Any | Callable[[], Any],
    optimizer: optimizers.OptimizerConfig | optax.GradientTransformation,
    loader: Loader,
    workdir: str | os.PathLike[str],
    schedule: optax.Schedule | None = None,
    mesh: Mesh | None = None,
    axes: Any = None,
    rules: sharding.Rules | None = None,
    trainable: partition.Predicate = partition.trainable,
    evaluate: Callable[[TrainState], Mapping[str, float]] | None = None,
    flops_per_token: float | None = None,
    extra_writers: Sequence[Any] = (),
) -> Result:
    """Trains, or goes on training if `workdir` has a checkpoint.

    Writes `metrics.jsonl`, TensorBoard events and `checkpoints/` into `workdir`. The device is kept
    busy: metrics of a step are fetched after the next one is under way. An interrupted run that is
    started again sees the batches, and ends with the numbers, of one that was not. It goes on from
    the newest checkpoint that can be read; damaged newer ones are set aside (`damaged-STEP`).

    Args:
      config: lengths and intervals.
      loss: see `step.Loss`.
      params: initial parameters, or a function that makes them.
      optimizer: a config, or any optax transformation.
      schedule: the learning rate, for the log; that of the optimizer where it is given as a config.
      loader: batches and their fingerprint.
      workdir: folder of the run.
      mesh: devices; None = one device.
      axes: logical axes of the parameters; None = replicated.
      rules: mesh axes by logical name.
      trainable: which leaves are trained.
      evaluate: called with the state; its values are logged as "eval/...".
      flops_per_token: from `flops.flops_per_token`, for the model's utilisation ("mfu").
      extra_writers: further writers of metrics.

    Raises:
      NonFiniteError: loss or gradient became NaN or infinite (`LoopConfig.skip_nonfinite`), naming
        the step and its batch; the last checkpoint stays.
      CheckpointError: the checkpoint in `workdir` does not fit this run, or all of them are
        damaged, or one cannot be written; the last good one stays.
      ValueError: the loader ended before the last step.
    """
    if isinstance(optimizer, optimizers.OptimizerConfig):
        schedule = optimizers.create_schedule(optimizer.schedule)
        optimizer = optimizers.create_optimizer(optimizer)
    layout = {
        "seed": config.seed,
        "ema": config.ema_decay is not None,
        "trainable": trainable,
        "mesh": mesh,
        "axes": axes,
        "rules": rules,
    }
    with contextlib.ExitStack() as stack:
        store = checkpoints.Checkpoints(
            pathlib.Path(workdir) / "checkpoints",
            keep=config.keep,
            fingerprint=loader.fingerprint(),
        )
        stack.callback(store.close)
        resumed = None
        if store.steps():
            resumed = store.resume(abstract_state(params, optimizer, **layout))
        state, notes = resumed or (create_state(params, optimizer, **layout), {})
        resume_step = int(state.step) if resumed else None
        del params, resumed
        step = make_train_step(
            loss,
            optimizer,
            mesh=mesh,
            rules=rules,
            accumulate=config.accumulate,
            trainable=trainable,
            schedule=schedule,
            ema_decay=config.ema_decay,
        )
        writer = writers.create_writer(
            workdir, resume_step, tensorboard=config.tensorboard, extra=extra_writers
        )
        stack.callback(writer.close)
        log = progress.Progress(
            writer,
            notes,
            steps=config.steps,
            done=resume_step or 0,
            every=config.log_every,
            flops_per_token=flops_per_token,
            peak_flops=config.peak_flops,
            bar=config.progress,
        )
        stack.enter_context(log)
        signal = stack.enter_context(interrupt.listening())
        run = _Run(config, store, log, writer, evaluate, notes, loader)
        return run.go(state, step, signal, lambda x: sharding.shard_batch(x, mesh, rules))


class _Run:
    """The loop itself, with what happens between steps."""

    def __init__(self, config, store, log, writer, evaluate, notes, loader):
        self._config, self._store, self._log = config, store, log
        self._writer, self._evaluate, self._loader = writer, evaluate, loader
        self._evaluation: dict[str, float] = dict(notes.get("evaluation", {}))
        self._skipped: int = notes.get("skipped", 0)
        self._skipped_in_a_row: int = notes.get("skipped_in_a_row", 0)
        self._pending: tuple[int, Mapping[str, Mean], int] | None = None

    def go(self, state, step, signal, place) -> Result:
        config, done = self._config, int(state.step)
        if done >= config.steps:
            return self._end(state, interrupted=False)
        with contextlib.ExitStack() as stack:
            batches = self._loader.iterator(done)
            if hasattr(batches, "close"):
                stack.callback(batches.close)
            tracer = profiling.Tracer()
            stack.callback(tracer.close)
            while done < config.steps:
                if signal.reached(done):
                    self._flush()
                    return self._end(state, interrupted=True)
                batch = _next(batches, done)
                batch = place(batch)
                tokens = _tokens(batch)
                tracer.before(done)
                state, metrics = step(state, batch)
                self._flush()  # the step before, while this one runs
                self._store.check()
                done += 1
                tracer.after(done, metrics)
                self._pending = (done, metrics, tokens)
                self._between(state, done)
        return self._end(state, interrupted=False)

    def _between(self, state: TrainState, done: int) -> None:
        """Evaluation and checkpoint, where they are due."""
        config, last = self._config, done == self._config.steps
        evaluates = self._evaluate and _due(config.eval_every, done, last)
        saves = last or _due(config.checkpoint_every, done)
        if not evaluates and not saves:
            return
        self._flush()
        if evaluates:
            self._evaluation = dict(self._evaluate(state))
            self._writer.write_scalars(
                done, {f"eval/{name}": value for name, value in self._evaluation.items()}
            )
        if saves:
            self._save(state)
        self._log.pause()

    def _flush(self) -> None:
        """Fetches and logs the metrics of the step that is under way, if there is one."""
        if self._pending is None:
            return
        step, metrics, tokens = self._pending
        self._pending = None
        values = metrics_lib.to_host(metrics)
        bad = values.pop("nonfinite").total or not math.isfinite(float(values["loss"].total))
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if bad else 0
        if self._skipped_in_a_row > self._config.skip_nonfinite:
            raise NonFiniteError(self._describe(step, values))
        self._skipped += bool(bad)
        counts = {"skipped": self._skipped} if self._config.skip_nonfinite else {}
        self._log.add(step, {} if bad else values, tokens, counts)

    def _describe(self, step: int, values: Mapping[str, Mean]) -> str:
        """What is known of a step that is not finite."""
        text = f"step {step}: loss {values['loss'].compute()}, gradient norm "
        text += f"{values['gradient_norm'].compute()} on batch {step - 1}"
        if hasattr(self._loader, "describe"):
            text += f" ({self._loader.describe(step - 1)})"
        if self._config.skip_nonfinite:
            text += f", after {self._skipped_in_a_row - 1} such steps in a row that were skipped"
        self._store.wait()
        last = self._store.latest_step()
        if last is None:
            return f"{text}; there is no checkpoint yet."
        return f"{text}; the last good checkpoint is {self._store.folder / str(last)}."

    def _save(self, state: TrainState) -> None:
        """With what the log needs to go on as if nothing had happened."""
        notes = self._log.notes() | {"evaluation": self._evaluation}
        if self._config.skip_nonfinite:
            notes |= {"skipped": self._skipped, "skipped_in_a_row": self._skipped_in_a_row}
        self._store.save(state, notes)

    def _end(self, state: TrainState, interrupted: bool) -> Result:
        self._save(state)
        self._store.wait()
        return Result(state, self._log.last, self._evaluation, interrupted)


def _due(every: int, done: int, last: bool = False) -> bool:
    return bool(every) and (last or done % every == 0)


def _next(batches: Iterator[Any], step: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise ValueError(f"the loader ended before the batch of step {step}.") from None


def _tokens(batch: Any) -> int:
    """Tokens of a batch of all processes, padding included: every array named "tokens"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
    return sum(
        leaf.size for path, leaf in leaves if parameters.path_name(path).split("/")[-1] == "tokens"
    )
