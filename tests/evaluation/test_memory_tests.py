"""Memory tests: exact solvers agree, labels balance, contexts fit, faults only on request."""

from __future__ import annotations

import collections
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.evaluation import memory_tests
from jaxllm.evaluation.memory_tests import base, contexts, differences, sets


class Words:
    """One token a word, number or sign."""

    def encode(self, text):
        return [0] * len(re.findall(r"\w+|[^\w\s]", text))

    def encode_with_offsets(self, text):
        spans = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
        return [0] * len(spans), spans


TOKENIZER = Words()
POOL = memory_tests.pseudo_words(1500)


def short(task, seed=0, **options):
    params = memory_tests.short_params(task, 200)
    return memory_tests.generate(
        task, params, seed, tokenizer=TOKENIZER, pool=POOL, samples=2, **options
    )


@pytest.mark.parametrize("task", memory_tests.TASKS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_the_solver_finds_every_reference(task, seed):
    for entry in short(task, seed):
        answer = memory_tests.solve(task, entry.prompt)
        assert answer == entry.reference
        scores = memory_tests.score_entry(entry, memory_tests.answer_text(answer)).scores
        assert scores["strict"] == 1
        # Published faults: the order of the agents' lines and their capitals.
        if task not in ("theory_of_mind", "quantity_state"):
            assert scores["exact_match"] == 1
        for trivial in ("", None, "none of these"):
            assert memory_tests.score_entry(entry, trivial).scores["strict"] < 1


@pytest.mark.parametrize("task", memory_tests.TASKS)
def test_a_seed_fixes_every_byte(task):
    first, again, other = short(task, 3), short(task, 3), short(task, 4)
    assert [e.to_json() for e in first] == [e.to_json() for e in again]
    assert {e.prompt for e in first}.isdisjoint(e.prompt for e in other)
    assert len({e.id for e in first + other}) == 2 * len(first)


def test_another_choice_of_variables_leaves_a_setting_as_it_was():
    params = {"context_length": (200,), "n_words": (4, 8)}
    options = {"tokenizer": TOKENIZER, "pool": POOL}
    both = memory_tests.generate("batch_key_value_search", params, **options)
    one = memory_tests.generate("batch_key_value_search", params | {"n_words": (8,)}, **options)
    assert one == [entry for entry in both if entry.params["n_words"] == 8]


@pytest.mark.parametrize(
    "task", [name for name, task in memory_tests.TASKS.items() if task.labels == ("yes", "no")]
)
def test_yes_and_no_balance(task):
    answers = collections.Counter(entry.reference for entry in short(task, 1))
    assert answers["yes"] == answers["no"] > 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(contexts.KINDS), st.integers(8, 300), st.booleans())
def test_contexts_fit_and_end_on_a_whole_item(seed, kind, n, bare_key):
    rng = np.random.default_rng(seed)
    text = memory_tests.make_context(rng, kind, n, TOKENIZER, POOL, bare_key=bare_key)
    assert 0 < len(TOKENIZER.encode(text)) <= n
    items = text.split(", ")
    if kind == "word_pairs":
        pairs = [item.split(": ") for item in items]
        assert all(
            key in POOL and value in POOL for key, value in pairs[: -1 if bare_key else None]
        )
        items = [word for pair in pairs for word in pair]
    if kind in ("unique_words", "word_pairs"):
        assert len(set(items)) == len(items) and set(items) <= {*POOL, ""}
    elif kind == "random_numbers":
        assert all(0 <= int(item) <= 1000 for item in items)
    else:
        assert all(re.fullmatch("[a-z]{2,9}", item) for item in items)
    # The next item would not have fitted.
    assert len(TOKENIZER.encode(text)) > n - 4


def test_absent_words_are_absent():
    for entry in short("string_search_word", 2) + short("group_membership", 2):
        context, instruction = base.parts(entry.prompt)
        word = base.quoted(instruction)[0]
        assert (word in re.findall(r"\w+", context)) == (entry.reference != "no")


def test_one_list_is_odd():
    for entry in short("identify_odd_group", 5):
        lists = differences.read_numbered(base.parts(entry.prompt)[0])
        kinds = collections.Counter(frozenset(words) for words in lists)
        assert sorted(kinds.values()) == [1, len(lists) - 1]
        assert len({len(kind) for kind in kinds}) == 1


def test_one_word_is_repeated():
    for entry in short("find_duplicates", 5):
        counts = collections.Counter(base.parts(entry.prompt)[0].split(", "))
        assert counts.pop(entry.reference) == entry.params["repetition_count"]
        assert set(counts.values()) == {1}


def test_roles_read_back():
    segments = [[["a", "b"], ["c", "d"]], [["e", "f"], ["g", "h"]]]
    words = {"Role 1": list("abcd"), "Role 2": list("efgh")}
    assert sets.read_turns(sets.turns(segments)) == words


def test_the_modulus_bounds_the_state():
    params = {"operation_step": (30,), "modulus": (10,)}
    entries = memory_tests.generate("quantity_state", params, tokenizer=TOKENIZER, samples=40)
    references = [entry.reference for entry in entries]
    assert set(references) <= set(range(10)) and len(set(references)) > 5
    assert references == [memory_tests.solve("quantity_state", e.prompt) for e in entries]
    assert entries[0].params == {"step": 30, "modulus": 10}


def test_published_faults_appear_on_request():
    odd = collections.Counter()
    for seed in range(10):
        for entry in short("identify_odd_group", seed, compat=True):
            lists = differences.read_numbered(base.parts(entry.prompt)[0])
            usual = collections.Counter(map(frozenset, lists)).most_common(1)[0][0]
            odd[sum(frozenset(words) != usual for words in lists)] += 1
    assert odd[2] > 0 and odd[3] > 0

    two = [e for s in range(5) for e in short("compare_two_lists", s, compat=True)]
    exact = [memory_tests.solve(e.task, e.prompt) == e.reference for e in two]
    assert any(exact) and not all(exact)
    answers = [memory_tests.score_entry(e, memory_tests.solve(e.task, e.prompt)) for e in two]
    # A drawn word may stand in the list, so not even a solver that ignores the order is perfect.
    strict, compat = (
        np.mean([a.scores[name] for a in answers]) for name in ("strict", "exact_match")
    )
    assert 1 >= strict > 0.95 > compat

    keys = memory_tests.generate(
        "key_value_search",
        {"context_length": tuple(range(40, 60)), "context_depth": (1,)},
        tokenizer=TOKENIZER,
        pool=POOL,
        samples=1,
        compat=True,
    )
    empty = [entry for entry in keys if entry.reference == ""]
    assert 0 < len(empty) < len(keys)
    scores = memory_tests.score_entry(empty[0], "anything").scores
    assert scores == {"exact_match": 1, "strict": 0}


@pytest.mark.parametrize(
    ("kind", "reference", "answer", "value"),
    [
        ("string", "no", "yes, I know", 0),
        ("string", "no", "The answer: **No**.", 1),
        ("string", "List 1", "List 12", 0),
        ("sequence", "a, b", "b, a", 0),
        ("sequence", "a, b", "final answer: A,  b.", 1),
        ("count", "4", "14", 0),
        ("count", "4", "four times", 1),
        ("count", "4", "It stands there 4 times", 1),
        ("multiset", "a, b", "b, a", 1),
        ("multiset", "a, b", "a, a", 0.5),
        ("set", ["a", "b"], "Final answer: b,a", 1),
        ("set", ["a", "b"], "a, c", 1 / 3),
        ("agents", {"Agent A": ["x"], "Agent B": ["y"]}, "**Agent A**: x", 0.5),
    ],
)
def test_strict_scores(kind, reference, answer, value):
    assert memory_tests.score(f"strict_{kind}", reference, answer)["strict"] == pytest.approx(value)


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
    st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
)
def test_overlap_is_symmetric_and_bounded(first, second):
    one = memory_tests.score("set_overlap", first, ", ".join(second))
    two = memory_tests.score("set_overlap", second, ", ".join(first))
    for name in ("jaccard_similarity", "f1"):
        assert one[f"set_overlap_{name}"] == pytest.approx(two[f"set_overlap_{name}"])
    assert max(one.values()) <= 1
    text = ", ".join(first)
    assert memory_tests.score("exact_match", text, text) == {"exact_match": 1}


def test_a_tree_of_files_is_read_back(tmp_path):
    entries = sorted(
        short("theory_of_mind") + short("set_state") + short("quantity_state"),
        key=lambda entry: (entry.category, entry.task),
    )
    memory_tests.save(entries, tmp_path)
    assert memory_tests.load(tmp_path) == entries
    path = tmp_path / "stateful_processing" / "set_state.jsonl"
    line = (
        '{"level": "stateful", "task": "identify_the_odd_group", "prompt": "p", "reference": "r"}'
    )
    path.write_text(f"{line}\n\nnonsense\n")
    with pytest.raises(ValueError, match=r"set_state\.jsonl:3"):
        memory_tests.load(tmp_path)
    path.write_text(f"{line}\n")
    [read] = [e for e in memory_tests.load(tmp_path) if e.task == "identify_odd_group"]
    assert (read.category, dict(read.params)) == ("stateful", {})


def test_a_report_sums_up_by_task_family_and_parameter():
    entries = short("key_value_search") + short("string_search_word") + short("set_state")
    solved = {entry.prompt: entry for entry in entries}

    def half(prompts):
        return [
            None
            if solved[p].params.get("context_depth") == 0
            else memory_tests.answer_text(solved[p].reference)
            for p in prompts
        ]

    report = memory_tests.run(entries, half, batch=3)
    assert report.tasks()["key_value_search"]["strict"].value == pytest.approx(0.8)
    assert report.families()["stateful_processing"].value == 1
    assert report.families()["search"].value == pytest.approx(0.8)
    values = {
        (task, value): mean.value
        for task, name, value, mean in report.parameters()
        if name == "context_depth"
    }
    assert values["key_value_search", 0] == 0 and values["string_search_word", 1] == 1
    with pytest.raises(ValueError, match="1 answers to 3"):
        memory_tests.run(entries, lambda prompts: [""], batch=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: short("nothing"), "task='nothing'"),
        (lambda: memory_tests.generate("count", {"depth": (1,)}, tokenizer=TOKENIZER), "depth"),
        (
            lambda: memory_tests.generate(
                "count", {"context_length": (20,)}, tokenizer=TOKENIZER, pool=POOL
            ),
            "needs",
        ),
        (
            lambda: memory_tests.make_context(
                np.random.default_rng(0), "unique_words", 200, TOKENIZER, POOL[:20]
            ),
            "too small",
        ),
        (lambda: memory_tests.score("bleu", "a", "a"), "expected one of"),
        (lambda: memory_tests.score("set_overlap", "a", "a"), "does not fit"),
        (lambda: memory_tests.score("strict_agents", "a", "a"), "does not fit"),
        (lambda: memory_tests.run([], lambda prompts: []), "empty"),
    ],
)
def test_errors_name_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_lengths_in_tokens_of_cl100k():
    pytest.importorskip("tiktoken")
    try:
        tokenizer = memory_tests.Cl100k()
    except OSError as error:
        pytest.skip(f"no vocabulary of cl100k_base: {error}")
    ids, offsets = tokenizer.encode_with_offsets("rabodi, lumeta")
    assert len(ids) == len(offsets) and offsets[-1][1] == len("rabodi, lumeta")
