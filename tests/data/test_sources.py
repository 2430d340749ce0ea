"""Every kind of corrupt input is found, with its file and line."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from jaxllm.data import sources, stdlib
from jaxllm.data.errors import DataError, RecordError

GOOD = b'{"text": "one"}'


def write(path, *lines, end=b"\n"):
    path.write_bytes(b"\n".join(lines) + end)
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON"),
        (b"{'text': 'x'}", "not JSON"),
        (b'{"text": "x"} {"text": "y"}', "not JSON"),
        (b'{"text": "x", "score": NaN}', "NaN is no JSON number"),
        (b'{"text": "x", "score": -Infinity}', "-Infinity is no JSON number"),
        (b'["text"]', "a JSON object was expected, not list"),
        (b'"text"', "a JSON object was expected, not str"),
        (b"null", "a JSON object was expected, not NoneType"),
        (b'{"texts": "x"}', "the field 'text' is missing; it has 'texts'"),
        (b"{}", "the field 'text' is missing; it has nothing"),
        (b'{"text": 3}', "the field 'text' holds int, not text"),
        (b'{"text": null}', "the field 'text' holds NoneType, not text"),
        (b'{"text": "a\\ud800b"}', "the field 'text' holds a lone surrogate"),
        (b'{"text": "x", "m": [{"c": "\\udfff"}]}', "the field 'm' holds a lone surrogate"),
        (b'{"text": "\xff"}', r"not UTF-8 \(byte 0xff at 10\)"),
        ('{"text": "é"}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines_are_found(tmp_path, line, reason):
    path = write(tmp_path / "x.jsonl", GOOD, b"", line, GOOD)
    found = list(sources.JsonLines(path).records())
    assert [type(record).__name__ for record in found] == ["Record", "BadRecord", "Record"]
    assert found[1].where == f"{path}:3"
    with pytest.raises(RecordError, match=reason) as error:
        list(sources.JsonLines(path))
    assert str(error.value).startswith(f"{path}:3: ")


def test_lines_end_at_newline_bytes_only(tmp_path):
    text = "a\u2028b\u0085c\x0bd"
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode(), b'{"text": "next"}\r']
    path = write(tmp_path / "x.jsonl", b"\xef\xbb\xbf" + lines[0], lines[1], end=b"")
    assert [record["text"] for record in sources.JsonLines(path)] == [text, "next"]


def test_gzip_and_its_damage(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join([GOOD] * 2000)))
    assert sum(1 for _ in sources.JsonLines(path)) == 2000
    path.write_bytes(path.read_bytes()[:-9])
    *_, last = sources.JsonLines(path).records()
    assert isinstance(last, sources.BadRecord)
    assert last.reason.startswith("the gzip file is damaged")
    assert str(path) in last.where


def test_paths(tmp_path):
    for name in "ba":
        write(tmp_path / f"{name}.jsonl", json.dumps({"text": name}).encode())
    source = sources.JsonLines(str(tmp_path / "*.jsonl"))
    assert [record["text"] for record in source] == ["a", "b"]
    with pytest.raises(DataError, match="no file matches 'none/.*'"):
        list(sources.JsonLines("none/*.jsonl"))
    with pytest.raises(DataError, match="no file matches"):
        list(sources.JsonLines([tmp_path / "a.jsonl", tmp_path / "c.jsonl"]))
    with pytest.raises(DataError, match="the list of paths is empty"):
        list(sources.JsonLines([]))


def test_description_follows_the_contents(tmp_path):
    path = write(tmp_path / "x.jsonl", GOOD)
    source = sources.JsonLines(path)
    before = source.describe()
    moved = write(tmp_path / "y.jsonl", GOOD)
    assert sources.JsonLines(moved).describe() == before
    write(path, GOOD, GOOD)
    assert source.describe() != before


def test_text_files(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes("a\u2028b\n\nc\nd\n \ne".encode())
    texts = {
        split: [record["text"] for record in sources.TextFiles(path, split)]
        for split in ("file", "line", "paragraph")
    }
    assert texts["file"] == ["a\u2028b\n\nc\nd\n \ne"]
    assert texts["line"] == ["a\u2028b", "c", "d", "e"]
    assert texts["paragraph"] == ["a\u2028b\n", "c\nd\n", "e"]
    places = [record.where for record in sources.TextFiles(path, "paragraph").records()]
    assert places == [f"{path}:1", f"{path}:3", f"{path}:6"]
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(RecordError, match=r"x.txt:2: not UTF-8 \(byte 0xff at 0\)"):
        list(sources.TextFiles(path, "line"))
    with pytest.raises(DataError, match="split is 'word'"):
        sources.TextFiles(path, "word")


def test_parquet(tmp_path, shared_dir):
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["a", None, "c"], "n": [1, 2, 3]})
    pyarrow.parquet.write_table(table, path, write_page_checksum=True)
    found = list(sources.Parquet(path, fields=("n",)).records())
    assert found[0].value == {"text": "a", "n": 1}
    assert (found[1].where, found[1].reason) == (
        f"{path}:1",
        "the field 'text' holds NoneType, not text",
    )
    with pytest.raises(DataError, match="no column 'body'; it has text, n"):
        list(sources.Parquet(path, text_fields=("body",)))
    data = path.read_bytes()
    at = data.index(b"\x01\x00\x00\x00\x61") + 4
    path.write_bytes(data[:at] + b"z" + data[at + 1 :])
    with pytest.raises(DataError, match="x.parquet: parquet damaged"):
        list(sources.Parquet(path))
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match="x.parquet: parquet damaged"):
        list(sources.Parquet(path))

    folder = shared_dir / "data/text/c4"
    parquet = sources.Parquet(folder / "hf/c4-validation-00000-of-01637.parquet")
    jsonl = sources.JsonLines(folder / "c4.en.validation.jsonl")
    assert list(parquet) == [{"text": record["text"]} for record in jsonl]


def test_hub_data_sets_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match="'no/such' needs the package datasets: pip install"):
        list(sources.HuggingFaceDataset("no/such"))


def test_standard_library():
    train, valid = (stdlib.StandardLibrary(split) for split in ("train", "validation"))
    paths = [{record["path"] for record in source} for source in (train, valid)]
    assert not paths[0] & paths[1]
    assert {name.split("/")[0].removesuffix(".py") for name in paths[1]} == stdlib.VALIDATION
    assert 300 < len(paths[0]) < 800
    assert "ast.py" in paths[0]
    unwanted = ("test/", "idlelib/", "lib2to3/", "site-packages/", "pydoc_data/topics.py")
    assert not [path for path in paths[0] if path.startswith(unwanted) or "cp1252" in path]
    assert train.describe() != valid.describe()
    with pytest.raises(DataError, match="split is 'test'"):
        stdlib.StandardLibrary("test")
