"""What one device of a slice can hold and do.

Figures are the vendors': Google Cloud's TPU system architecture pages (HBM, peak, bidirectional
inter-chip bandwidth, halved here to what a chip can send) and NVIDIA's H200 data sheet (NVLink,
likewise halved); for 4-bit integers, of which the pages say nothing, Pallas' own table of TPUs.
Where the compiler of a TPU leaves a program less than the published HBM, that counts. The clock of
a TPU is its bfloat16 peak over the operations that its matrix units do in a cycle.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts devices.

    Attributes:
      name: as in a topology name, "v5p" of "v5p:4x4x4".
      platform: "tpu" or "cuda".
      hbm_bytes: memory that a program may use.
      hbm_bandwidth: bytes a second.
      peak_flops: dense operations a second by the type of the operands; a type that is absent is
        not faster than bfloat16, or not published.
      link_bandwidth: bytes a second that the device can send to its neighbours, all links together.
      dimensions: length of a topology's shape.
      devices_per_chip: devices that share a chip.
      cores: of a device, which share the steps of a kernel.
      clock_hz: of a TPU's core; None where the compiler gives no cycles.
    """

    name: str
    platform: str
    hbm_bytes: int
    hbm_bandwidth: float
    peak_flops: dict[str, float]
    link_bandwidth: float
    dimensions: int
    devices_per_chip: int = 1
    clock_hz: float | None = None
    cores: int = 1


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            "tpu",
            int(30.75 * GIB),
            1228e9,
            {"bfloat16": 275e12},
            300e9,
            3,
            clock_hz=1.05e9,
            cores=2,
        ),
        Chip(
            "v5e",
            "tpu",
            int(15.75 * GIB),
            819e9,
            {"bfloat16": 197e12, "int8": 393e12, "int4": 788e12},
            200e9,
            2,
            clock_hz=1.5e9,
        ),
        Chip(
            "v5p",
            "tpu",
            95 * GIB,
            2765e9,
            {"bfloat16": 459e12, "int8": 918e12, "int4": 1840e12},
            600e9,
            3,
            clock_hz=1.75e9,
            cores=2,
        ),
        Chip(
            "v6e",
            "tpu",
            int(31.24 * GIB),
            1640e9,
            {"bfloat16": 918e12, "int8": 1836e12, "int4": 3680e12},
            400e9,
            2,
            clock_hz=1.75e9,
        ),
        Chip(
            "tpu7x",
            "tpu",
            int(94.74 * GIB),
            3690e9,
            {"bfloat16": 1153.5e12, "float8_e4m3fn": 2307e12},
            300e9,
            3,
            2,
            2.2e9,
        ),
        Chip(
            "h200",
            "cuda",
            141 * 10**9,
            4800e9,
            {"bfloat16": 989e12, "int8": 1979e12, "float8_e4m3fn": 1979e12},
            450e9,
            1,
        ),
    )
}
