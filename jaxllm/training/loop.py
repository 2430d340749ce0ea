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
      started again
    sees the batches, and ends with the numbers, of one that was not.

    Args:
      config: lengths and intervals.
      loss: see `step.Loss`.
      params: initial parameters, or a function that makes them.
      optimizer: a config, or any optax transformation.
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
      NonFiniteError: loss or gradient became NaN or infinite, naming the step; the last checkpoint
        stays.
      CheckpointError: the checkpoint in `workdir` does not fit this run.
      ValueError: the loader ended before the last step.
    """
    schedule = None
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
    store = checkpoints.Checkpoints(
        pathlib.Path(workdir) / "checkpoints", keep=config.keep, fingerprint=loader.fingerprint()
    )
    writer = writers.MultiWriter()
    try:
        resume_step = store.latest_step()
        notes: dict[str, Any] = {}
        if resume_step is None:
            state = create_state(params, optimizer, **layout)
        else:
            state, notes = store.restore(abstract_state(params, optimizer, **layout))
        del params
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
        with interrupt.listening() as signal, log:
            run = _Run(config, store, log, writer, evaluate, notes)
            return run.go(
                state, step, loader, signal, lambda x: sharding.shard_batch(x, mesh, rules)
            )
    finally:
        writer.close()
        store.close()


class _Run:
    """The loop itself, with what happens between steps."""

    def __init__(self, config, store, log, writer, evaluate, notes):
        self._config, self._store, self._log = config, store, log
        self._writer, self._evaluate = writer, evaluate
        self._evaluation: dict[str, float] = dict(notes.get("evaluation", {}))
        self._pending: tuple[int, Mapping[str, Mean], int] | None = None

    def go(self, state, step, loader, signal, place) -> Result:
        config, done = self._config, int(state.step)
        if done >= config.steps:
            return self._end(state, interrupted=False)
        with contextlib.ExitStack() as stack:
            batches = loader.iterator(done)
            if hasattr(batches, "close"):
                stack.callback(batches.close)
            tracer = profiling.Tracer()
            stack.callback(tracer.close)
            while done < config.steps:
                if signal.reached(done):
                    self._flush()
                    return self._end(state, interrupted=True)
                batch = _next(batches, done)
                tokens = _tokens(batch) * jax.process_count()
                tracer.before(done)
                state, metrics = step(state, place(batch))
                self._flush()  # the step before, while this one runs
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
        nonfinite = values.pop("nonfinite").total  # always 0 in what is logged
        if nonfinite or not math.isfinite(float(values["loss"].total)):
            self._store.wait()
            last = self._store.latest_step()
            kept = (
                "there is no checkpoint yet"
                if last is None
                else (f"the last good checkpoint is {self._store.folder / str(last)}")
            )
            raise NonFiniteError(
                f"step {step}: loss {values['loss'].compute()}, gradient norm "
                f"{values['gradient_norm'].compute()}; {kept}."
            )
        self._log.add(step, values, tokens)

    def _save(self, state: TrainState) -> None:
        """With what the log needs to go on as if nothing had happened."""
        self._store.save(state, self._log.notes() | {"evaluation": self._evaluation})

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
    """Tokens of a host batch, padding included: every array named "tokens"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
    return sum(
        leaf.size for path, leaf in leaves if parameters.path_name(path).split("/")[-1] == "tokens"
    )
