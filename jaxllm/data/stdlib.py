"""The text that every Python carries: sources and docstrings of the standard library.

About 9 MB of code and English, read in place from the running interpreter and never copied
elsewhere (licence: PSF-2.0, with notices in some files). The text differs between Python versions,
so its hash belongs to every recipe and no stored loss can be compared across versions.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

from jaxllm.data.errors import DataError
from jaxllm.data.files import sha256_files
from jaxllm.data.sources import BadRecord, Record, Source

# Validation is a fixed list of modules, present in Python 3.11 to 3.13 alike and varied in
# subject: about 8 % of the bytes. A split by hash put a third of the bytes into validation.
VALIDATION = frozenset(
    "argparse bisect calendar csv dataclasses difflib fractions heapq ipaddress json pathlib queue "
    "shlex statistics string tempfile textwrap zipfile".split()
)
# Tests, the editor, a copy of old grammar, and what is installed beside the library.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)


@dataclasses.dataclass(frozen=True)
class StandardLibrary(Source):
    """Modules of the standard library, one record a file.

    Left out are tests, `idlelib`, `lib2to3`, generated tables (character maps of `encodings`,
    `pydoc_data/topics`, `_sysconfigdata*`), `sitecustomize`, symbolic links, and files that are
    no UTF-8.

    Attributes:
      split: "train", or "validation", the modules of `VALIDATION`.
    Records: {"text", "path"}, sorted by path.
    """

    split: str = "train"

    def __post_init__(self):
        if self.split not in ("train", "validation"):
            raise DataError(f"split is {self.split!r}; expected 'train' or 'validation'")

    def files(self) -> list[pathlib.Path]:
        """The files of this split, sorted by their path below the library."""
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
            found += [pathlib.Path(folder) / name for name in names if name.endswith(".py")]
        kept = sorted(path for path in found if self._wanted(path.relative_to(root), path))
        if not kept:
            raise DataError(f"no source files of the standard library in {root}")
        return kept

    def records(self) -> Iterator[Record | BadRecord]:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        for path in self.files():
            where = path.relative_to(root).as_posix()
            yield Record(where, {"text": path.read_bytes().decode("utf-8"), "path": where})

    def describe(self) -> Any:
        return {"standard library": sha256_files(self.files()), "split": self.split}

    def _wanted(self, relative: pathlib.Path, path: pathlib.Path) -> bool:
        top = relative.parts[0].removesuffix(".py")
        if (top in VALIDATION) != (self.split == "validation"):
            return False
        if path.is_symlink() or top == "sitecustomize" or top.startswith("_sysconfigdata"):
            return False
        if relative.as_posix() == "pydoc_data/topics.py":
            return False
        data = path.read_bytes()
        if top == "encodings" and (b"decoding_table" in data or b"decoding_map" in data):
            return False
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True
