"""A multiple-choice task from the standard library: which line of code comes next.

Offline, without a licence to mind, and hard enough that a small model is well above chance and far
from perfect. Questions of one module are alike: they are clusters.
"""

from __future__ import annotations

import json
import pathlib
import random

from experiments import report
from jaxllm.data.sources import Record
from jaxllm.data.stdlib import StandardLibrary

NAME = "python_next_line"
CONTEXT_LINES, PER_FILE, CHOICES = 10, 6, 4

_YAML = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def write(folder: pathlib.Path, seed: int = 0) -> None:
    """Writes the questions and the task's YAML into a folder."""
    rows = [row for record in _validation() for row in _questions(*record, seed)]
    path = folder / f"{NAME}.jsonl"
    report.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    report.write_text(folder / f"{NAME}.yaml", _YAML.format(name=NAME, path=json.dumps(str(path))))


def _validation() -> list[tuple[str, str]]:
    """(path, text) of the modules that `pretrain:tiny` does not train on."""
    records = StandardLibrary("validation").records()
    return [(r.value["path"], r.value["text"]) for r in records if isinstance(r, Record)]


def _questions(source: str, text: str, seed: int) -> list[dict[str, object]]:
    """Questions about one file; the wrong lines come from elsewhere in it, as deeply indented."""
    rng = random.Random(f"{seed} {source}")
    lines = text.splitlines(keepends=True)
    by_indent: dict[int, list[str]] = {}
    for line in lines:
        if len(line.strip()) >= 8:
            by_indent.setdefault(len(line) - len(line.lstrip()), []).append(line)
    places = [
        number
        for number, line in enumerate(lines)
        if number >= CONTEXT_LINES and line in by_indent.get(len(line) - len(line.lstrip()), [])
    ]
    found: list[dict[str, object]] = []
    for place in sorted(rng.sample(places, min(PER_FILE, len(places)))):
        right = lines[place]
        others = sorted(set(by_indent[len(right) - len(right.lstrip())]) - {right})
        if len(others) < CHOICES - 1:
            continue
        choices = [right, *rng.sample(others, CHOICES - 1)]
        rng.shuffle(choices)
        found.append(
            {
                "source": source,
                "context": "".join(lines[place - CONTEXT_LINES : place]),
                "choices": choices,
                "answer": choices.index(right),
            }
        )
    return found
