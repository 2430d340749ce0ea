"""Several processes agree on which checkpoint can be read, also where only one finds the damage."""

from __future__ import annotations

from tests.distributed import processes


def test_damage_to_the_part_of_one_process(tmp_path):
    folder = tmp_path / "checkpoints"

    def arguments(address, index):
        return ["-m", "tests.faults.shards", address, index, folder]

    with processes.started(2, arguments, tmp_path) as started:
        outputs = processes.ended(started, tmp_path)
    assert all("resumed from 1 [1]" in output for output in outputs)
    assert f"{folder / '2'} cannot be read by another process. It is set aside" in outputs[0]
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "damaged-2"]
