"""Corrupt data stop a run before it trains: one line that names the file, and the line in it."""

from __future__ import annotations

import gzip
import json
import pathlib

import pyarrow
import pyarrow.parquet
import pytest

from experiments import config_files, launch, text_data
from tests.experiments import micro

GOOD = [json.dumps({"text": f"This is document number {i}."}) for i in range(50)]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """What the launcher says of the data at a path, having refused it."""
    monkeypatch.chdir(tmp_path)

    def start(path: pathlib.Path, **overrides) -> str:
        assert launch.main(micro.arguments(tmp_path, "out", data__path=path, **overrides)) == 2
        [line] = capsys.readouterr().err.strip().split("\n")
        assert not (tmp_path / "out" / "checkpoints").exists()
        return line

    return start


def test_json_lines(tmp_path, refused):
    path = tmp_path / "x.jsonl"
    for bad, reason in (('{"text": "cut', "not JSON"), ('{"text": 3}', "holds int, not text")):
        path.write_text("\n".join([*GOOD[:30], bad, *GOOD[30:]]))
        message = refused(path)
        assert f"{path}:31: " in message and reason in message
    zipped = tmp_path / "x.jsonl.gz"
    zipped.write_bytes(gzip.compress("\n".join(GOOD).encode())[:-12])
    assert f"{zipped}:" in (message := refused(zipped)) and "the gzip file is damaged" in message


def test_parquet(tmp_path, refused):
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["some text", None, "more text"] * 20})
    pyarrow.parquet.write_table(table, path)
    assert f"{path}:1: the field 'text' holds NoneType, not text" in refused(path)
    path.write_bytes(path.read_bytes()[:-30])
    assert f"{path}: parquet damaged from row 0 on" in refused(path)


def test_token_cache_and_tokenizer(tmp_path, refused, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(GOOD))
    options = {"data__path": path, "tokenizer__path": "", "tokenizer__vocab_size": 270}
    overrides = [
        argument.removeprefix("--config.")
        for argument in micro.arguments(tmp_path, "out", **options)
        if argument.startswith("--config.")
    ]
    text_data.prepare(config_files.resolve("pretrain:text", overrides).config)
    del options["data__path"]
    [tokens] = tmp_path.glob("runs/cache/tokens/*/train.tokens")
    whole = tokens.read_bytes()

    tokens.write_bytes(whole[:-2])
    message = refused(path, **options)
    assert f"{tokens.relative_to(tmp_path)} has {len(whole) - 2} bytes, but" in message
    assert "delete this folder to build the cache again" in message

    tokens.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert f"{tokens.relative_to(tmp_path)}: SHA-256 is" in refused(path, **options)
    tokens.write_bytes(whole)

    [tokenizer] = tmp_path.glob("runs/cache/tokenizers/*/tokenizer.json")
    tokenizer.write_bytes(tokenizer.read_bytes()[:-100])
    assert str(tokenizer.parent.relative_to(tmp_path)) in refused(path, **options)
