"""Speed of scoring against lm-evaluation-harness' transformers backend, side by side.

Both adapters are handed the same token ids for the same random 15 M Llama in float32, with the same
number of threads; rows are sorted and padded by either's own rules. The sides take turns, so that a
busy machine slows both alike.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import random
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from experiments.benchmarks import training
from experiments.benchmarks.turns import take_turns

Request = tuple[None, list[int], list[int]]


def measure(
    *,
    questions: int = 32,
    documents: int = 16,
    batch_size: int = 16,
    rounds: int = 5,
    threads: int = 2,
    compare: bool = True,
) -> dict[str, Any]:
    """Tokens a second of both sides by kind of request, and the ratio of the median times.

    A request's tokens are those of its context and continuation, however they are computed.

    Args:
      questions: of four choices each, for both kinds of choice.
      documents: windows of 256 tokens that are scored whole.
      batch_size: requests run at once, on both sides.
      rounds: times that each side has its turn.
      threads: CPU threads of both.
      compare: also run the other side; without torch and transformers only ours is measured.
    """
    training.bind_to_cores(threads)
    need = ("lm_eval",) if not compare else ("lm_eval", "torch", "transformers")
    missing = [name for name in need if importlib.util.find_spec(name) is None]
    if "lm_eval" in missing:
        return {"left_out": "lm_eval missing: pip install 'jaxllm[eval]'"}
    results: dict[str, Any] = {"threads": threads, "batch_size": batch_size}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model"
        sides = {"jaxllm": our_side(path, batch_size)}
        if compare and not missing:
            sides["transformers"] = their_side(path, batch_size, threads)
        elif compare:
            results["comparison_left_out"] = f"{' and '.join(missing)} missing"
        for kind, asked in requests(questions, documents).items():
            results[kind] = compare_sides(sides, asked, rounds)
    return results


def requests(questions: int, documents: int) -> dict[str, list[Request]]:
    """Random token ids, by kind: choices of several tokens, letters, and whole windows."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, 32000) for _ in range(count)]

    choices, letters = [], []
    for _ in range(questions):
        context = ids(rng.randint(40, 160))
        choices += [(None, context, ids(rng.randint(4, 16))) for _ in range(4)]
        context = ids(rng.randint(60, 200))
        letters += [(None, context, ids(1)) for _ in range(4)]
    return {
        "choices": choices,
        "letters": letters,
        "windows": [(None, ids(1), ids(255)) for _ in range(documents)],
    }


def compare_sides(
    sides: dict[str, Callable[[list[Request]], Any]], asked: list[Request], rounds: int
) -> dict[str, Any]:
    """Times the sides in turn after a first, untimed call each (which compiles)."""
    tokens = sum(len(context) + len(continuation) for _, context, continuation in asked)
    answers = {name: score(asked) for name, score in sides.items()}
    turns = {name: functools.partial(score, asked) for name, score in sides.items()}
    seconds = take_turns(turns, rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    found: dict[str, Any] = {
        f"{name}_tokens_per_second": tokens / median for name, median in medians.items()
    }
    if "transformers" in medians:
        found["ratio"] = medians["transformers"] / medians["jaxllm"]
        found["largest_difference"] = max(
            abs(a[0] - b[0])
            for a, b in zip(answers["jaxllm"], answers["transformers"], strict=True)
        )
    return found


def our_side(folder: pathlib.Path, batch_size: int) -> Callable[[list[Request]], Any]:
    """Scores with our adapter; leaves the checkpoint in the folder."""
    import jax

    from jaxllm.data.byte_tokenizer import ByteTokenizer
    from jaxllm.evaluation.harness import JaxLM
    from jaxllm.models import hf, parameters, presets

    config = presets.llama_15m()
    params = jax.jit(lambda: parameters.init_params(config, jax.random.key(0)))()
    hf.save_hf(folder, config, params)
    lm = JaxLM(config, params, ByteTokenizer(), batch_size=batch_size)
    return lambda asked: lm._loglikelihood_tokens(asked, disable_tqdm=True)


def their_side(
    folder: pathlib.Path, batch_size: int, threads: int
) -> Callable[[list[Request]], Any]:
    """Scores the same checkpoint with the harness's `HFLM`."""
    import tokenizers
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # The requests are token ids: any tokenizer does.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>"
    )
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    return lambda asked: lm._loglikelihood_tokens(asked, disable_tqdm=True)
