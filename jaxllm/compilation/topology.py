"""Names of slices ("v5p:4x4x4", "h200:8"), and their devices without the hardware.

The compiler of a TPU is in the package `libtpu`, that of a GPU in JAX's CUDA plugin. Only one of
them is used in a process, and `environment` must be set before `jax` is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxllm.compilation.chips import CHIPS, Chip

EXAMPLES = "v5p:4x4x4, v5e:16x16, v6e:16x16, tpu7x:4x4x4, h200:8"


class TopologyError(ValueError):
    """A name that is no topology, or a compiler that is not installed."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of TPU chips, or GPUs of one host.

    Attributes:
      chip: what one device is.
      shape: chips along each dimension; one number for GPUs.
    """

    chip: Chip
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != self.chip.dimensions or min(self.shape) < 1:
            wanted = "x".join("N" * self.chip.dimensions)
            raise TopologyError(f"topology {self.name!r}: expected {self.chip.name}:{wanted}.")

    @property
    def name(self) -> str:
        """As it is written, "v5p:4x4x4"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_devices(self) -> int:
        """Devices as JAX counts them."""
        return math.prod(self.shape) * self.chip.devices_per_chip


def parse(name: str) -> Topology:
    """Reads "v5p:4x4x4" or "h200:8"; without numbers, "h200", it is one GPU.

    Raises:
      TopologyError: an unknown chip or a shape that it does not come in.
    """
    kind, separator, shape = name.strip().lower().partition(":")
    if kind not in CHIPS:
        raise TopologyError(
            f"topology {name!r}: unknown chip {kind!r}, expected one of {', '.join(CHIPS)}"
            f" (as in {EXAMPLES})."
        )
    chip = CHIPS[kind]
    if not separator and chip.platform == "cuda":
        shape = "1"
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape):
        raise TopologyError(f"topology {name!r}: expected a shape, as in {EXAMPLES}.")
    return Topology(chip, tuple(int(n) for n in shape.split("x")))


def environment(topology: Topology, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that compiles for a topology and executes on the CPU.

    Raises:
      TopologyError: the compiler is not installed; the message has the command that installs it.
    """
    values = dict(inherited) | {"JAX_PLATFORMS": "cpu"}
    # Simulated CPU devices would only slow the start.
    flags = [f for f in values.get("XLA_FLAGS", "").split() if "host_platform_device" not in f]
    values["XLA_FLAGS"] = " ".join(flags)
    if topology.chip.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise TopologyError(
                f"compiling for {topology.name} needs libtpu: pip install 'jaxllm[aot]'."
            )
        return values | {
            # No metadata server to ask what machine this is, and no lock on a device.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    if not has_cuda_plugin():
        version = importlib.metadata.version("jax")
        raise TopologyError(
            f"compiling for {topology.name} needs JAX's CUDA plugin (132 MB, no CUDA): pip install"
            f" --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}."
        )
    return values | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for CUDA is installed."""
    try:
        return any(
            importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (13, 12)
        )
    except ModuleNotFoundError:
        return False


def devices(topology: Topology) -> list[Any]:
    """Devices to build a mesh of: programs compile for them, nothing runs on them.

    Call it in a process that was started with `environment(topology, ...)`.

    Raises:
      TopologyError: the compiler does not know the shape.
    """
    import jax
    from jax.experimental import topologies

    kind = topology.chip.name
    shape = "x".join(map(str, topology.shape))
    try:
        if topology.chip.platform == "cuda":
            target = pathlib.Path(__file__).parent / "targets" / f"{kind}.textproto"
            found = topologies.get_topology_desc(
                "", platform="cuda", target_config=target.read_text(), topology=f"1x1x{shape}"
            )
        else:
            # The two cores of a v4 chip run as one, as they do where JAX finds the chip.
            options = {"chip_config_name": "megacore"} if kind == "v4" else {}
            found = topologies.get_topology_desc(f"{kind}:{shape}", platform="tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise TopologyError(f"topology {topology.name!r}: {str(error).splitlines()[0]}") from error
    if len(found.devices) != topology.num_devices:
        raise TopologyError(
            f"topology {topology.name!r} has {len(found.devices)} devices,"
            f" expected {topology.num_devices}."
        )
    return list(found.devices)
