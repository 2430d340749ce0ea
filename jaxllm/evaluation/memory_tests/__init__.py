"""Programmable memory tests: which operations on its context a model can do.

    entries = generate("key_value_search", seed=0, tokenizer=tokenizer)
    report = run(entries, model_fn)        # model_fn: prompts -> answers
    report.tasks(), report.families(), report.parameters()

Programs write the tests with exact references: atomic tasks in six families and composite ones,
after Xia, Ruehle, Rajmohan and Shokri, "Minerva: A Programmable Memory Test Benchmark for Language
Models" (ICML 2025, arXiv:2502.03358). All runs on the host.
"""

from jaxllm.evaluation.memory_tests.base import Reference, Task
from jaxllm.evaluation.memory_tests.contexts import Cl100k, make_context, pseudo_words
from jaxllm.evaluation.memory_tests.entries import (
    DEFAULT_TASKS,
    TASKS,
    Entry,
    generate,
    get_task,
    load,
    save,
    short_params,
    solve,
)
from jaxllm.evaluation.memory_tests.runner import Report, Scored, run, score_entry
from jaxllm.evaluation.memory_tests.scorers import answer_text, reference_text, score

__all__ = [
    "DEFAULT_TASKS",
    "TASKS",
    "Cl100k",
    "Entry",
    "Reference",
    "Report",
    "Scored",
    "Task",
    "answer_text",
    "generate",
    "get_task",
    "load",
    "make_context",
    "pseudo_words",
    "reference_text",
    "run",
    "save",
    "score",
    "score_entry",
    "short_params",
    "solve",
]
