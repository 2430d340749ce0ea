"""The adapter against the forward pass, lm-evaluation-harness' own backend, and on local tasks."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.data.byte_tokenizer import ByteTokenizer
from jaxllm.data.chat import ChatTemplate
from jaxllm.data.tokenizers import load_tokenizer
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import forward
from jaxllm.models.hf import load_hf
from jaxllm.models.parameters import init_params

pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")

from jaxllm.evaluation import harness  # noqa: E402

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
)
PAIRS = [
    (STORY, " She saw a big dog."),
    (STORY + " ", "She saw a big cat."),
    (STORY, " She"),
    (STORY, " He"),
    (STORY, " The"),
    ("Once upon a", " time"),
    ("", "Once upon a time"),
    ("One day,  ", " a boy went to the "),
    ("The cat sat on the m", "at and was happy."),
    ("word " * 120, "end of the story"),
]


def requests(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


@pytest.fixture(scope="module")
def folder(shared_dir):
    return shared_dir / "data" / "models" / "stories260k"


@pytest.fixture(scope="module")
def stories(folder):
    config, params = load_hf(folder)
    return config, params, load_tokenizer(folder)


@pytest.fixture(scope="module")
def random_model():
    tokenizer = ByteTokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        mlp_dim=24,
        max_positions=128,
        initializer_range=0.4,
        eos_token_ids=(tokenizer.eos_id,),
    )
    return config, jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)), tokenizer


@pytest.fixture(params=["random_model", "stories"])
def model(request):
    return request.getfixturevalue(request.param)


def log_probs(model, tokens):
    """log p [T - 1, V] of the next token after each but the last."""
    config, params, _ = model
    padded = jnp.asarray([tokens + [0] * (-len(tokens) % 128)])  # causal: padding is unseen
    logits = jax.jit(forward, static_argnums=0)(config, params, padded).logits[0]
    return np.asarray(jax.nn.log_softmax(logits))[: len(tokens) - 1]


def test_log_likelihoods_equal_the_forward_pass(model):
    lm = harness.JaxLM(*model, batch_size=4)
    found = lm.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for (context, continuation), (total, is_greedy) in zip(PAIRS, found, strict=True):
        if context:
            tokens = lm.tok_encode(context + continuation)
            start = len(lm.tok_encode(context.rstrip()))
        else:
            tokens = [lm.prefix_token_id, *lm.tok_encode(continuation, add_special_tokens=False)]
            start = 1
        tokens, start = (
            tokens[-lm.max_length - 1 :],
            max(start - max(0, len(tokens) - lm.max_length - 1), 1),
        )
        rows = log_probs(model, tokens)[start - 1 :]
        expected = rows[np.arange(len(rows)), tokens[start:]].sum()
        assert total == pytest.approx(expected, abs=1e-3)
        assert is_greedy == bool((rows.argmax(-1) == tokens[start:]).all())


def test_rolling_windows_predict_every_token_once(model):
    lm = harness.JaxLM(*model, max_length=32, batch_size=3)
    text = STORY * 2
    (total,) = lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    tokens = lm.tok_encode(text)
    whole, expected, done = [lm.prefix_token_id, *tokens], 0.0, 0
    while done < len(tokens):
        end = min(done + 32, len(tokens))
        window = whole[max(0, end - 32) : end + 1]
        rows = log_probs(model, window)[-(end - done) :]
        expected += rows[np.arange(end - done), tokens[done:end]].sum()
        done = end
    assert total == pytest.approx(expected, abs=2e-3)
    assert lm.loglikelihood_rolling(requests(("",)), disable_tqdm=True)[0] == pytest.approx(
        log_probs(model, [lm.prefix_token_id, *lm.tok_encode("")])[0, lm.prefix_token_id]
        if lm.tok_encode("")
        else 0.0,
        abs=1e-3,
    )


def test_generation_stops_and_contexts_are_cut(stories):
    lm = harness.JaxLM(*stories, batch_size=8, max_length=64)
    (plain,) = lm.generate_until(requests((STORY, {"max_gen_toks": 24})), disable_tqdm=True)
    stop = plain[12:15]
    options = [
        {"until": [stop], "max_gen_toks": 24},
        {"until": stop, "max_new_tokens": 24, "temperature": 0.7, "do_sample": False},
        {"max_gen_toks": 24, "do_sample": True, "temperature": 0.0, "num_beams": 1},
    ]
    prompts = [(STORY, o) for o in options]
    # Only the last 40 tokens fit beside 24 new ones.
    prompts.append(("No. " * 50 + STORY, {"max_gen_toks": 24}))
    found = lm.generate_until(requests(*prompts), disable_tqdm=True)
    assert found[0] == found[1] == plain.split(stop)[0]
    assert found[2] == plain
    kept = lm.tok_encode("No. " * 50 + STORY)[-40:]
    (completion,) = harness.generate.generate(
        *stories[:2], [kept], max_new_tokens=24, stop_tokens=[1, 2]
    )
    assert found[3] == lm.tok_decode(completion)
    with pytest.raises(ValueError, match="no room for a prompt"):
        lm.generate_until(requests((STORY, {"max_gen_toks": 64})), disable_tqdm=True)
    with pytest.raises(ValueError, match="num_beams"):
        lm.generate_until(requests((STORY, {"num_beams": 4})), disable_tqdm=True)


def test_samples_depend_on_the_seed_and_differ_between_repeats(stories):
    options = {"max_gen_toks": 16, "do_sample": True, "temperature": 1.0, "top_k": 0, "until": []}
    again = requests((STORY, options), (STORY, options))
    one, same, other = (
        harness.JaxLM(*stories, seed=seed).generate_until(again, True) for seed in (0, 0, 1)
    )
    assert one == same != other and one[0] != one[1]
    options |= {"top_k": 1, "do_sample": None}
    assert len(set(harness.JaxLM(*stories).generate_until(again, True))) == 1


def test_chat_template(stories):
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    lm = harness.JaxLM(*stories, template=ChatTemplate(source))
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(history) == "<user>Hi</s><a>"
    history.append({"role": "assistant", "content": "Well, "})
    opened = lm.apply_chat_template(history, add_generation_prompt=False)
    assert opened == "<user>Hi</s><assistant>Well,"
    assert lm.chat_template(True) == source and lm.chat_template(False) is None
    with pytest.raises(ValueError, match="by name"):
        lm.chat_template("tool_use")
    with pytest.raises(ValueError, match="no chat template"):
        harness.JaxLM(*stories).apply_chat_template(history)


def write_task(folder, name, text, rows):
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}\n"
        f"test_split: test\n{text}"
    )


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Three tasks over local files, one of each kind of request."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    rows = [
        {"story": f"{name} was sad because", "answers": [f"{end}." for end in ends], "right": i % 2}
        for i, (name, ends) in enumerate(
            [("Lily", ("the toy was lost", "zebra", "it rained")), ("Tom", ("he fell", "she won"))]
        )
    ]
    write_task(
        tmp_path,
        "endings",
        'output_type: multiple_choice\ndoc_to_text: "{{story}}"\ndoc_to_choice: answers\n'
        "doc_to_target: right\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
        rows,
    )
    write_task(
        tmp_path,
        "telling",
        'output_type: generate_until\ndoc_to_text: "{{start}}"\ndoc_to_target: "{{end}}"\n'
        'generation_kwargs: {until: ["."], max_gen_toks: 24}\n'
        "metric_list: [{metric: exact_match}]\n",
        [{"start": STORY, "end": "?"}, {"start": "Once upon a", "end": "?"}],
    )
    write_task(
        tmp_path,
        "reading",
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity},"
        " {metric: bits_per_byte}]\n",
        [{"text": STORY}, {"text": STORY * 3}],
    )
    return tmp_path


def test_local_tasks_run_offline_and_answers_are_cached(stories, tasks, monkeypatch):
    lm = harness.JaxLM(*stories)
    options = {"task_folder": tasks, "use_cache": tasks / "answers", "bootstrap_iters": 0}
    names = ["endings", "telling", "reading"]
    first = harness.evaluate(lm, names, **options)
    scores = first["results"]
    for sample in first["samples"]["endings"]:
        totals = [resps[0][0] for resps in sample["resps"]]
        texts = [" " + answer for answer in sample["doc"]["answers"]]
        found = lm.loglikelihood(requests(*[(sample["doc"]["story"], t) for t in texts]), True)
        np.testing.assert_allclose(totals, [total for total, _ in found], atol=1e-3)
        assert sample["acc"] == float(np.argmax(totals) == sample["doc"]["right"])
    texts = [STORY, STORY * 3]
    rolling = lm.loglikelihood_rolling(requests(*[(text,) for text in texts]), True)
    size = sum(len(text.encode()) for text in texts)
    bits = -sum(rolling) / size / np.log(2)
    assert scores["reading"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
    (told,) = lm.generate_until(requests((STORY, {"until": ["."], "max_gen_toks": 24})), True)
    answers = {s["doc"]["start"]: s["resps"][0][0] for s in first["samples"]["telling"]}
    assert answers[STORY] == told and "." not in told
    assert first["config"]["model"] == "jaxllm"

    def refuse(*_, **__):
        raise AssertionError("the answer should have come from the cache")

    monkeypatch.setattr(harness.scoring, "score_continuations", refuse)
    monkeypatch.setattr(harness.generate, "sample", refuse)
    assert harness.evaluate(lm, names, **options)["results"] == scores


@pytest.mark.parity
@pytest.mark.parametrize("name", ["stories260k", "babyllama-char105"])
def test_answers_equal_those_of_the_harness_own_backend(shared_dir, name):
    pytest.importorskip("torch", reason="live comparison needs the extra `parity` (torch)")
    pytest.importorskip("transformers", reason="live comparison needs the extra `parity`")
    from lm_eval.models.huggingface import HFLM

    path = shared_dir / "data" / "models" / name
    # Its cache of logits answers ("Once upon a", " time") with those of ("", "Once upon a time").
    theirs = HFLM(
        pretrained=str(path), device="cpu", dtype="float32", batch_size=3, logits_cache=False
    )
    config, params = load_hf(path)
    lm = harness.JaxLM(config, params, load_tokenizer(path), batch_size=3)
    assert lm.max_length == theirs.max_length
    for (ours, greedy), (expected, their_greedy) in zip(
        lm.loglikelihood(requests(*PAIRS), True),
        theirs.loglikelihood(instances("loglikelihood", *PAIRS), True),
        strict=True,
    ):
        assert ours == pytest.approx(expected, abs=1e-4, rel=1e-6)
        assert greedy == their_greedy
    texts = [(STORY,), (STORY * 30,), ("a",)]
    np.testing.assert_allclose(
        lm.loglikelihood_rolling(requests(*texts), True),
        theirs.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), True),
        rtol=1e-5,
    )
    options = {"until": ["park", "\n\n"], "max_gen_toks": 60, "do_sample": False}
    prompts = [(text, options) for text in (STORY, "One day", "Tom and Lily " * 60)]
    assert lm.generate_until(requests(*prompts), True) == theirs.generate_until(
        instances("generate_until", *prompts), True
    )


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("t", i, 1))
        for i, args in enumerate(arguments)
    ]
