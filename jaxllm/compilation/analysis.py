"""What the compiler says about a step: memory, operations, collectives, time; what to change."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import time
from typing import Any

import jax

from jaxllm.compilation import hlo
from jaxllm.compilation.chips import Chip

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step is for, which a compiled program does not tell.

    Attributes:
      params: number of parameters of the model.
      tokens: tokens that one step handles, over all devices.
      flops_per_token: operations that the method needs for one (no recomputation).
      microbatches: parts that the batch is cut into.
      rows: rows of a batch, over all devices.
      remat: what the backward pass recomputes ("none", "dots", "full"), if anything is trained.
    """

    params: int
    tokens: int
    flops_per_token: float
    microbatches: int = 1
    rows: int = 1
    remat: str | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      arguments, outputs, temporaries: of the program; None where the compiler refused it and only
        says how much it would have needed.
      aliased: part of the outputs that lies where arguments were.
      code: the program itself.
      needed: all that must be there at once.
      available: memory of the device.
    """

    arguments: int | None
    outputs: int | None
    aliased: int | None
    temporaries: int | None
    code: int | None
    needed: int
    available: int

    @property
    def fits(self) -> bool:
        """Whether the program runs on the device."""
        return self.needed <= self.available

    @property
    def spare(self) -> int:
        """Bytes left over; negative where it does not fit."""
        return self.available - self.needed


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step.

    Attributes:
      memory: bytes a device.
      compile_seconds: on this machine.
      xla_flops: operations a device by XLA's cost analysis, loop bodies counted once; None where
        the compiler gives none.
      xla_bytes: of memory accessed on a device, likewise.
      xla_optimal_seconds: XLA's estimate of the time, loop bodies counted once; None where there is
        none above zero.
      summary: read from the HLO text; None where there is no text.
      note: why something is missing, or "".
    """

    memory: Memory
    compile_seconds: float
    xla_flops: float | None
    xla_bytes: float | None
    xla_optimal_seconds: float | None
    summary: hlo.Summary | None
    note: str


def compile_step(lowered: jax.stages.Lowered, chip: Chip, dump: pathlib.Path | None = None) -> Step:
    """Compiles for a chip that need not be there. A program too big for it is an answer.

    Args:
      lowered: the program.
      chip: what it is compiled for.
      dump: an empty folder where all that XLA writes about the program stays; None = nowhere.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses the program for another reason.
    """
    with contextlib.ExitStack() as stack:
        folder = dump or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The text that a TPU's program prints itself fails to parse where collectives overlap with
        # a computation; the one that the compiler writes does not.
        options: dict[str, str | bool] = {
            "xla_dump_to": str(folder),
            "xla_dump_hlo_as_text": True,
        }
        start = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            needed = exhausted_bytes(str(error))
            if needed is None:
                raise
            memory = Memory(None, None, None, None, None, needed, chip.hbm_bytes)
            note = "the compiler refused the program: it needs more memory than there is"
            return Step(memory, time.perf_counter() - start, None, None, None, None, note)
        seconds = time.perf_counter() - start
        summary, note = _summary(compiled, folder)
    costs = compiled.cost_analysis() or {}
    # Of some large programs the estimate is negative.
    optimal = costs.get("optimal_seconds", 0.0)
    return Step(
        memory=_memory(compiled, chip),
        compile_seconds=seconds,
        xla_flops=costs.get("flops"),
        xla_bytes=costs.get("bytes accessed"),
        xla_optimal_seconds=optimal if optimal > 0 else None,
        summary=summary,
        note=note,
    )


def exhausted_bytes(message: str) -> int | None:
    """The bytes that a program would need, from the compiler's refusal; None for other errors.

    "... total memory required for HLO temporaries (44.39G) exceeds available HBM (15.75G)" or
    "... Used 20.50G of 15.75G hbm. ...".
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    number = r"([\d.]+)([KMGT]?)"
    for pattern in (rf"\({number}\) exceeds available HBM", rf"Used {number} of [\d.]+[KMGT]? hbm"):
        if found := re.search(pattern, message):
            return int(float(found.group(1)) * _UNITS[found.group(2)])
    return None


def advice(memory: Memory, work: Work | None, devices: int) -> list[str]:
    """What to change so that a step fits, with numbers where they follow from what is known."""
    if memory.fits:
        return []
    rows: list[str] = []
    held = None if memory.arguments is None else memory.needed - memory.temporaries
    if held is not None and held >= memory.available:
        times = -(-held // memory.available)
        return [
            f"arguments and outputs alone take {gigabytes(held)} of {gigabytes(memory.available)}:"
            f" spread them over at least {times} times as many devices ({devices * times}), by a"
            " larger mesh.fsdp, mesh.tensor or mesh.expert"
        ]
    if work is not None and work.remat is not None:
        if work.remat != "full":
            rows.append(f"model.remat=full instead of {work.remat}: keeps one stream a layer only")
        least = work.microbatches + 1
        if held is not None:
            least = -(-work.microbatches * memory.temporaries // (memory.available - held))
        fitting = [n for n in range(max(least, 2), work.rows + 1) if work.rows % n == 0]
        if fitting:
            rows.append(
                f"train.microbatches={fitting[0]} instead of {work.microbatches}, if temporaries"
                " shrink with the rows"
            )
    rows.append(
        f"more devices: {devices} hold {gigabytes(memory.needed)} each, over by"
        f" {gigabytes(-memory.spare)}"
    )
    return rows


def gigabytes(size: float | None) -> str:
    """10^9 bytes, as "1.51 GB"."""
    return "-" if size is None else f"{size / 1e9:.2f} GB"


def times(step: Step, work: Work | None, chip: Chip, devices: int) -> dict[str, float | None]:
    """Estimates of a step's time and what utilisation they would mean.

    None of them is a measurement. `compute` and `collective` are lower bounds: matrix products at
    the bfloat16 peak, and bytes sent at the bandwidth of all links together. `cycles` is the
    compiler's estimate for all that is no collective, loops multiplied (TPU only). Loops whose
    trip count depends on values (experts in blocks of tokens) count once: with such there are no
    utilisations.

    Returns:
      compute_seconds, collective_seconds, cycle_seconds; the operations that the method needs over
      what the devices could do in the larger of the first two, `mfu_bound`, and in the largest of
      all three, `mfu_estimate` (TPU only).
    """
    result: dict[str, float | None] = dict.fromkeys(
        ("compute_seconds", "collective_seconds", "cycle_seconds", "mfu_bound", "mfu_estimate")
    )
    if step.summary is None:
        return result
    sent = sum(row["sent_bytes"] for row in step.summary.by_kind().values())
    peak = chip.peak_flops["bfloat16"]
    compute, collective = step.summary.flops / peak, sent / chip.link_bandwidth
    bound = max(compute, collective)
    cycles = None
    if chip.clock_hz and step.summary.cycles:
        cycles = step.summary.cycles / chip.clock_hz
    result |= {"compute_seconds": compute, "collective_seconds": collective}
    result["cycle_seconds"] = cycles
    if work is not None and bound > 0 and not step.summary.unknown_loops:
        needed = work.tokens * work.flops_per_token / (peak * devices)
        result["mfu_bound"] = needed / bound
        result["mfu_estimate"] = None if cycles is None else needed / max(bound, cycles)
    return result


def _memory(compiled: jax.stages.Compiled, chip: Chip) -> Memory:
    stats: Any = compiled.memory_analysis()
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    code = stats.generated_code_size_in_bytes
    needed = arguments + outputs - aliased + temporaries + code
    return Memory(arguments, outputs, aliased, temporaries, code, needed, chip.hbm_bytes)


def _summary(compiled: jax.stages.Compiled, folder: pathlib.Path) -> tuple[hlo.Summary | None, str]:
    """The summary of the text that the compiler wrote, or of what the program prints."""
    # Named "after_codegen" it also has the cycles that a TPU's compiler expects.
    for pattern in ("*after_codegen.txt", "*after_optimizations.txt"):
        written = sorted(folder.glob(pattern), key=lambda path: path.stat().st_size)
        if written:
            break
    try:
        text = written[-1].read_text() if written else compiled.as_text()
        return hlo.summarize(hlo.parse(text)), ""
    except (jax.errors.JaxRuntimeError, ValueError, IndexError, KeyError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return None, f"no collectives: the program's text cannot be read ({reason})"
