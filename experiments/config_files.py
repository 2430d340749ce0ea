"""Config files: find them, describe them without importing, resolve one with its overrides.

A config file is a plain Python file with

- a docstring whose first line says what the experiment shows,
- `EXPERIMENT`: the module whose `run(config, workdir) -> dict` does the work,
- `VARIANTS`: a dict from variant name to one line about it, the default first,
- `PAPER` (optional): the paper that it reproduces,
- `ONE_SHOT` (optional): True where a run has nothing to continue, so that each start may bring
  another config into the same workdir,
- `MULTI_PROCESS` (optional): True where several processes can share a run,
- `get_config(variant) -> ml_collections.ConfigDict`.

All but the function are literals, so that a table of all experiments needs no import.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

import experiments
from experiments.errors import UsageError, suggest

INSTALLED = pathlib.Path(experiments.__file__).resolve().parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """What a config file says about itself."""

    name: str
    path: pathlib.Path
    summary: str
    paper: str
    experiment: str
    variants: dict[str, str]
    one_shot: bool
    multi_process: bool


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A config file, the chosen variant and the config after overrides (locked)."""

    file: ConfigFile
    variant: str
    config: ml_collections.ConfigDict


def folders() -> list[pathlib.Path]:
    """The folders searched for a short name: `configs` here, then the installed one."""
    here = pathlib.Path("configs").resolve()
    return [folder for folder in dict.fromkeys([here, INSTALLED]) if folder.is_dir()]


def available() -> dict[str, pathlib.Path]:
    """All config files by name; those of the current folder win over the installed ones."""
    found: dict[str, pathlib.Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.py")):
            if path.stem != "__init__":
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def find(name: str) -> pathlib.Path:
    """The file meant by `name`: a path from here, a path among the installed configs, or a stem."""
    path = pathlib.Path(name)
    if path.suffix == ".py":
        installed = INSTALLED.parent / path
        for candidate in (path, installed):
            if candidate.is_file():
                return candidate.resolve()
    elif name in available():
        return available()[name]
    raise UsageError(f"no config {name!r}.{suggest(path.stem, available())}")


def describe(path: pathlib.Path) -> ConfigFile:
    """Reads the docstring and the literal constants of a config file without running it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid Python: {error}") from error
    constants: dict[str, Any] = {"PAPER": "", "ONE_SHOT": False, "MULTI_PROCESS": False}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("EXPERIMENT", "VARIANTS", *constants):
                try:
                    constants[name] = ast.literal_eval(node.value)
                except ValueError as error:
                    raise UsageError(f"{path}: {name} must be a literal.") from error
    for name, kind in (("EXPERIMENT", str), ("VARIANTS", dict)):
        if not isinstance(constants.get(name), kind) or not constants[name]:
            raise UsageError(f"{path} is not a config: it needs {name}, a {kind.__name__} literal.")
    summary = (ast.get_docstring(tree) or path.stem).splitlines()[0]
    return ConfigFile(
        path.stem,
        path,
        summary,
        constants["PAPER"],
        constants["EXPERIMENT"],
        constants["VARIANTS"],
        constants["ONE_SHOT"],
        constants["MULTI_PROCESS"],
    )


def resolve(spec: str, overrides: Iterable[str] = ()) -> Resolved:
    """Loads `file[:variant]` and applies overrides of the form `key.sub=value`.

    Raises:
      UsageError: unknown file, variant or key, or a value of the wrong type.
    """
    name, _, variant = spec.partition(":")
    file = describe(find(name))
    variant = variant or next(iter(file.variants))
    if variant not in file.variants:
        raise UsageError(f"no variant {variant!r} in {file.name}.{suggest(variant, file.variants)}")
    module_spec = importlib.util.spec_from_file_location(f"config_{file.name}", file.path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    config = module.get_config(variant)
    _apply(config, list(overrides))
    return Resolved(file, variant, config.lock())


def to_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The config as JSON values (tuples become lists).

    Raises:
      UsageError: a value that JSON cannot hold, by key.
    """

    def plain(value: Any, key: str) -> Any:
        if isinstance(value, (ml_collections.ConfigDict, dict)):
            return {str(k): plain(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v, f"{key}[{i}]") for i, v in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UsageError(f"config value {key}={value!r} is not JSON: {type(value).__name__}.")

    return plain(config, "")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _apply(config: ml_collections.ConfigDict, overrides: list[str]) -> None:
    """Parses the overrides by the types of the defaults, with ml_collections' own flag parser."""
    known = _leaf_keys(config)
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator:
            raise UsageError(f"--config.{key} needs a value: --config.{key}=VALUE.")
        base = key.split("[")[0]
        inside = [name for name in known if name.startswith(f"{base}.")]
        if inside:
            raise UsageError(f"config key {key!r} is a group; it holds {', '.join(inside)}.")
        if base not in known:
            raise UsageError(f"no config key {key!r}.{suggest(base, known)}")
    argv = ["launch"] + [f"--config.{override}" for override in overrides]
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, lock_config=False, sys_argv=argv
        )
        values(argv)
    except (flags.Error, TypeError, ValueError, IndexError) as error:
        message = " ".join(str(error).split()).split(" Currently supported")[0]
        raise UsageError(message) from error


def _leaf_keys(config: ml_collections.ConfigDict, prefix: str = "") -> list[str]:
    """The dotted names of all leaves, ["a.b", ...]."""
    keys: list[str] = []
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            keys += _leaf_keys(value, f"{prefix}{key}.")
        else:
            keys.append(prefix + key)
    return keys
