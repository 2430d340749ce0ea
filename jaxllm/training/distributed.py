"""One run on several processes: joining them, sharing their work, and ending together.

Every process runs the same program on its own devices; arrays on a mesh span them all. Which rows
of a batch a process reads follows from the mesh (`row_block`). What must be done once, such as
building a token cache, the first process does while the others wait (`on_first`). The processes
are taken to share the file system of the workdir, as checkpoints do.

A process that dies takes the others with it: those in a collective operation with it fail at once
where the network notices, all of them when its heartbeats have been missing for `peer_timeout`
seconds. Started again, the run goes on from its last checkpoint, on any number of processes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from jaxllm.models.placement import DEFAULT_RULES, Rules, mesh_axes

T = TypeVar("T")

PEER_TIMEOUT = 100
START_TIMEOUT = 300
# Waiting has no end of its own, because a dead process ends it; barriers want a number.
_FOREVER = 7 * 24 * 3600
# How long a failed process waits for others that fail with it.
_FAREWELL = 5


class ClusterError(ValueError):
    """The processes of a run cannot be joined."""


class FirstProcessError(RuntimeError):
    """What the first process did for all of them failed; its message is in this one's."""


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    peer_timeout: int = PEER_TIMEOUT,
    start_timeout: int = START_TIMEOUT,
) -> None:
    """Joins the processes of a run, by `jax.distributed.initialize`.

    To be called before any device is touched. With no argument JAX finds the cluster by itself: TPU
    VMs and GKE, SLURM steps, Kubernetes jobs, Open MPI.

    Args:
      coordinator: HOST:PORT of the first process, which must be reachable from all.
      num_processes: of the run.
      process_id: this one's place, from 0.
      peer_timeout: seconds without a heartbeat after which a process counts as dead, which ends the
        others.
      start_timeout: seconds to wait for the others to appear; JAX ends the process where they do
        not.

    Raises:
      ClusterError: some of the three are given and others not, or values that do not fit; nothing
        is given and JAX knows no cluster here; or the coordinator's port is taken.
    """
    _check(coordinator, num_processes, process_id)
    explicit = coordinator is not None
    # Of the collectives that CPUs have, the one that needs nothing installed.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if explicit else None,
            initialization_timeout=start_timeout,
            heartbeat_timeout_seconds=peer_timeout,
        )
    except ValueError as error:
        if explicit:
            raise
        raise ClusterError(
            f"no cluster was found here ({error}) JAX knows TPU VMs and GKE, SLURM steps, "
            "Kubernetes jobs and Open MPI by their environment; elsewhere give coordinator, "
            "num_processes and process_id."
        ) from error


def _check(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Refuses what is half given or does not fit."""
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        words = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ClusterError(f"{words} without {' and '.join(missing)}: give all three, or none.")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"coordinator={coordinator}: expected HOST:PORT, as in 10.0.0.1:1234.")
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ClusterError(
            f"process_id={process_id} of num_processes={num_processes}: expected 0 to "
            "num_processes - 1."
        )
    if process_id == 0 and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        with socket.socket() as probe:  # JAX would crash on a port that is taken
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except OSError as error:
                raise ClusterError(f"coordinator={coordinator}: {error.strerror}.") from error


def row_block(mesh: Mesh | None, rules: Rules | None = None) -> tuple[int, int]:
    """Which part of every batch this process reads: (index, number of blocks of rows).

    Processes whose devices hold the same rows (because the mesh splits something else between
    them) read the same block.

    Args:
      mesh: None = one device.
      rules: mesh axes by logical name.
    """
    if mesh is None or jax.process_count() == 1:
        return 0, 1
    axes = mesh_axes((DEFAULT_RULES if rules is None else rules)["batch"])
    shards = int(np.prod([mesh.shape[name] for name in axes], dtype=int))
    by_row = NamedSharding(mesh, PartitionSpec(axes))  # one row a shard
    where: Mapping[Any, Any] = by_row.devices_indices_map((shards,))
    held: dict[int, set[int]] = {}
    for device, (rows,) in where.items():
        held.setdefault(device.process_index, set()).add(rows.start or 0)
    return block_of(jax.process_index(), held)


def block_of(process: int, held: Mapping[int, Set[int]]) -> tuple[int, int]:
    """(index, number of blocks) of a process, by the shards of rows that each process holds.

    Where these are no blocks of equal size without overlap, all rows are one block, of which the
    devices of each process take theirs.
    """
    blocks = sorted({tuple(sorted(rows)) for rows in held.values()})
    overlap = sum(map(len, blocks)) != len(set().union(*held.values()))
    if overlap or len({len(block) for block in blocks}) != 1:
        return 0, 1
    return blocks.index(tuple(sorted(held[process]))), len(blocks)


def on_first(function: Callable[[], T]) -> T:
    """Has the first process do something that the others wait for; all get its result.

    Args:
      function: called on the first process only; gives a JSON value.

    Raises:
      FirstProcessError: on the others, where it raised on the first (which raises what it raised).
    """
    if jax.process_count() == 1:
        return function()
    outcome: dict[str, Any] = {}
    failure: BaseException | None = None
    if jax.process_index() == 0:
        try:
            outcome["value"] = function()
        except BaseException as error:
            failure = error
            outcome["error"] = f"{error}" or type(error).__name__
    first = gather(outcome)[0]
    if failure is not None:
        raise failure
    if "error" in first:
        raise FirstProcessError(f"process 0 failed: {first['error']}")
    return first["value"]


def gather(value: Any) -> list[Any]:
    """A JSON value of every process, on all, in their order. They wait for each other."""
    if jax.process_count() == 1:
        return [value]
    # At the coordinator: collective operations do not wait for long on every network.
    _meet("gather", _FOREVER)
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(encoded)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(encoded)] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _meet(name: str, seconds: int) -> None:
    multihost.get_barrier_sync_fn()(key=name, timeout_ms=seconds * 1000)


def leave(status: int) -> None:
    """Ends a process that failed, without letting the others wait for it.

    Where all fail alike this returns, for each to end in its own way. Otherwise the process ends
    here with `status`: an ordinary end would first wait for the others, which wait for this one.
    """
    if not jax.distributed.is_initialized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        _meet("leave", _FAREWELL)
        jax.distributed.shutdown()
    except Exception:
        os._exit(status)
