"""What kernels of an NVIDIA GPU take of a multiprocessor, from the text that XLA writes down.

Shared memory is in XLA's own list of kernels. Registers are given out by NVIDIA's assembler, ptxas,
which XLA does not run for a GPU that is not there: `pip install nvidia-cuda-nvcc` brings it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile

_KERNEL = re.compile(
    r"kCustomKernel .*?\] (\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), .*"
    r"shared_memory: (\d+) bytes"
)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)Used (\d+) registers", re.DOTALL)
_SPILLS = re.compile(r"(\d+) bytes spill stores")


@dataclasses.dataclass(frozen=True)
class Resources:
    """Of one kernel.

    Attributes:
      programs: thread blocks of the grid.
      threads, shared_bytes: of each of them.
      registers: of each thread; None where there is no ptxas.
      spilled_bytes: written by each thread for want of registers; None likewise.
    """

    programs: int
    threads: int
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None


def resources(folder: pathlib.Path, architecture: str = "sm_90a") -> dict[str, Resources]:
    """By name, of all kernels of a program that was compiled with `xla_dump_to` the folder."""
    assembled: dict[str, tuple[int, int]] = {}
    for path in folder.glob("*.ptx"):
        assembled |= _assemble(path.read_text(), architecture)
    found = {}
    for path in folder.glob("*thunk_sequence.txt"):
        for name, x, y, z, threads, shared in _KERNEL.findall(path.read_text()):
            registers, spilled = assembled.get(name, (None, None))
            programs = int(x) * int(y) * int(z)
            found[name] = Resources(programs, int(threads), int(shared), registers, spilled)
    return found


def find_ptxas() -> str | None:
    """The assembler: of the path, or of the package nvidia-cuda-nvcc."""
    if path := shutil.which("ptxas"):
        return path
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found in pathlib.Path(folder).glob("*/bin/ptxas"):
            return str(found)
    return None


def _assemble(text: str, architecture: str) -> dict[str, tuple[int, int]]:
    """{kernel: (registers, bytes spilled)}; empty without the assembler or without code."""
    start, ptxas = text.find(".version"), find_ptxas()
    if start < 0 or ptxas is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernels.ptx"
        source.write_text(text[start:])
        command = [ptxas, f"-arch={architecture}", "-v", str(source), "-o", f"{folder}/kernels"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses a kernel: {done.stderr.strip()[-500:]}")
    return {
        name: (int(registers), sum(map(int, _SPILLS.findall(properties))))
        for name, properties, registers in _ENTRY.findall(done.stderr)
    }
