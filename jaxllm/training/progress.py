"""What a run reports while it trains: means over the steps of a window, speed, time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
from tqdm import tqdm

from jaxllm.training import flops
from jaxllm.training import metrics as metrics_lib
from jaxllm.training.metrics import Mean


class Progress:
    """Collects metrics of steps and writes their means every n steps; shows a progress bar.

    The values written depend on the steps alone, also across an interruption: the unfinished window
      is
    part of `notes`, which go into the checkpoint. Speed ("tokens_per_second", "mfu") is measured
    since the last line, without the first step (compilation), evaluations and saving.

    Args:
      writer: where lines go, as "train/<name>".
      notes: what `notes` returned when the checkpoint was written; {} at the start.
      steps, done: steps of the whole run, and those behind it.
      every: steps between lines; 0 = no lines. The last step has one too.
      flops_per_token: operations that a token costs; None = no utilisation.
      peak_flops: operations a second of all devices; None = from the table of known devices.
      bar: whether to show a bar (on the first process).
    """

    def __init__(
        self,
        writer: Any,
        notes: Mapping[str, Any],
        *,
        steps: int,
        done: int,
        every: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        bar: bool = True,
    ):
        self._writer, self._steps, self._every = writer, steps, every
        self._window = {name: Mean(*parts) for name, parts in notes.get("window", {}).items()}
        self.last: dict[str, float] = dict(notes.get("last", {}))
        self._flops = flops_per_token
        self._peak = flops.peak_flops() if peak_flops is None else peak_flops
        self._seconds, self._tokens = 0.0, 0
        self._since: float | None = None
        hidden = not bar or jax.process_index() != 0
        self._bar = tqdm(
            total=steps,
            initial=done,
            disable=hidden,
            unit="step",
            dynamic_ncols=True,
            desc="training",
        )

    def add(
        self,
        step: int,
        values: Mapping[str, Mean],
        tokens: int,
        counts: Mapping[str, float] | None = None,
    ) -> None:
        """Counts one finished step.

        Args:
          step: how many are done.
          values: its metrics, on the host; {} leaves it out of the means.
          tokens: of its batch.
          counts: values that a line shows as they stand.
        """
        self._window = metrics_lib.merge(self._window, values)
        now = time.perf_counter()
        if self._since is not None:
            self._seconds += now - self._since
            self._tokens += tokens
        self._since = now
        self._bar.update()
        if not self._every or (step % self._every and step != self._steps):
            return
        self.last = metrics_lib.compute(self._window) | dict(counts or {}) | self._speed()
        self._writer.write_scalars(step, {f"train/{name}": v for name, v in self.last.items()})
        if "loss" in self.last:
            self._bar.set_postfix_str(f"loss {self.last['loss']:.4f}", refresh=False)
        self._window, self._seconds, self._tokens = {}, 0.0, 0

    def notes(self) -> dict[str, Any]:
        """The unfinished window and the last line: JSON keeps float64 exactly."""
        window = {name: [float(m.total), float(m.weight)] for name, m in self._window.items()}
        return {"window": window, "last": self.last}

    def pause(self) -> None:
        """Leaves the time since the last step out of the speed."""
        self._since = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: Any) -> None:
        self._bar.close()

    def _speed(self) -> dict[str, float]:
        if not self._seconds:
            return {}
        rate = self._tokens / self._seconds
        if not (self._flops and self._peak):
            return {"tokens_per_second": rate}
        return {"tokens_per_second": rate, "mfu": rate * self._flops / self._peak}
