"""Models as an `LM` of lm-evaluation-harness, so that every task of it runs on them.

    lm = JaxLM(config, params, tokenizer, template=load_chat_template(folder))
    results = evaluate(lm, ["arc_easy", "gsm8k"], num_fewshot=5)

Prompts are cut, windows laid and answers trimmed by the harness's own rules, so that numbers can be
compared with those of its other backends. Needs the extra `eval`; torch is not needed.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import tqdm

from jaxllm.data.chat import ChatError, ChatTemplate
from jaxllm.data.tokenizers import Tokenizer
from jaxllm.inference import generate, scoring
from jaxllm.inference.sampling import SamplingConfig
from jaxllm.models.config import ModelConfig
from jaxllm.models.parameters import count_params

try:
    from lm_eval.api.model import TemplateLM
except ImportError:  # The module can be imported; making a model says what is missing.
    TemplateLM = None

_MAX_NEW_TOKENS = 256  # Of a request that names none, as with the harness's other backends.


class JaxLM(TemplateLM or object):  # type: ignore[misc]
    """What the harness asks of a language model.

    Args:
      config, params, tokenizer: the model.
      template: its chat template, for `apply_chat_template=True`.
      batch_size: requests run at once.
      max_length: the longest input of the model, from whose left side longer contexts lose tokens;
        None = the config's `max_positions`.
      seed: of requests that sample. A request's randomness depends on the seed and on its place
        among those of its call.
      name: how results name the model.

    Raises:
      ImportError: lm_eval is not installed.
      ValueError: the tokenizer has no token to begin or to end a text with.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        seed: int = 0,
        name: str = "jaxllm",
    ):
        if TemplateLM is None:
            raise ImportError("the harness is missing: pip install 'jaxllm[eval]'")
        super().__init__()
        if tokenizer.eos_id is None and tokenizer.bos_id is None:
            raise ValueError(
                "the harness needs a tokenizer with a token that begins or ends texts."
            )
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_length = config.max_positions if max_length is None else max_length
        self.max_gen_toks = _MAX_NEW_TOKENS
        self.name = name
        self._model = config, params
        self._template = template
        self._seed = seed
        self._opening = scoring.opening_tokens(tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.bos_id if self.tokenizer.eos_id is None else self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of built requests."""
        return self.tokenizer.fingerprint().replace("/", "_").replace(":", "_")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, after the tokens that the checkpoint puts in front of texts.

        Args:
          string: the text.
          add_special_tokens: whether to put them there; None = unless the text begins with one, as
            chat templates do.
        """
        ids = self.tokenizer.encode(string)
        if add_special_tokens is None:
            add_special_tokens = ids[:1] != [self.prefix_token_id]
        return [*self._opening, *ids] if add_special_tokens else ids

    def tok_decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(list(tokens), skip_special=skip_special_tokens)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """(log p of the continuation, whether greedy decoding gives it) of every request."""
        pairs = [(context or [self.prefix_token_id], ids) for _, context, ids in requests]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # A tokenizer that joins the two can leave nothing of the continuation: it is certain.
        real = [index for index, (_, ids) in enumerate(pairs) if ids]
        with _progress(len(real), "scoring", disable_tqdm) as bar:

            def keep(place: int, score: scoring.Score) -> None:
                index = real[place]
                answers[index] = score.total, score.is_greedy
                text = requests[index][0]
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answers[index])
                bar.update()

            scoring.score_continuations(
                *self._model,
                [pairs[index] for index in real],
                batch_size=self.batch_size,
                # The last token of a continuation is no input.
                max_length=self.max_length + 1,
                on_score=keep,
            )
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """log p of whole texts, each in windows of `max_length` tokens."""
        from lm_eval import utils

        windows, owners = [], []
        for index, request in enumerate(requests):
            found = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in found:
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (total, _) in zip(owners, scores, strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to its stop strings."""
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        texts = [""] * len(requests)
        with _progress(len(requests), "generating", disable_tqdm) as bar:
            for indices in by_options.values():
                options = _Options.parse(requests[indices[0]].args[1], self.max_gen_toks)
                room = self.max_length - options.max_new_tokens
                if room < 1:
                    raise ValueError(
                        f"{options.max_new_tokens} new tokens leave no room for a prompt within "
                        f"max_length={self.max_length}: lower max_gen_toks."
                    )
                prompts = {i: self._prompt(requests[i].args[0], room) for i in indices}
                indices.sort(key=lambda index: -len(prompts[index]))
                for start in range(0, len(indices), self.batch_size):
                    batch = indices[start : start + self.batch_size]
                    found = self._generate([prompts[index] for index in batch], options, batch)
                    for index, text in zip(batch, found, strict=True):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                        bar.update()
        return texts

    def _prompt(self, context: str, room: int) -> list[int]:
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]

    def _generate(
        self, prompts: list[list[int]], options: _Options, row_ids: list[int]
    ) -> list[str]:
        completions = generate.sample(
            *self._model,
            prompts,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            key=jax.random.key(self._seed),
            stop_tokens=tuple({*self._model[0].eos_token_ids, self.eot_token_id}),
            stop_strings=options.until,
            tokenizer=self.tokenizer,
            row_ids=row_ids,
        )
        texts = []
        for (completion,) in completions:
            text = self.tok_decode(completion.tokens)
            for stop in options.until:
                text = text.split(stop)[0]
            texts.append(text)
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A dialogue as text; without a generation prompt its last message is left open.

        Raises:
          ChatError: there is no template, or it refuses the dialogue.
        """
        template = self._require_template()
        try:
            text = template.render(chat_history, add_generation_prompt)
        except ChatError:
            # Some templates know no system messages.
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            text = template.render(rest, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Source of the template that `apply_chat_template` uses; None where it is off."""
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ValueError(
                f"chat template {chat_template!r}: load it by name with "
                "jaxllm.data.chat.load_chat_template and give it to JaxLM."
            )
        return self._require_template().source

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise ChatError("the model was given no chat template (template=...).")
        return self._template

    def get_model_info(self) -> dict[str, Any]:
        """What the results say about the model."""
        config, params = self._model
        return {
            "model": self.name,
            "model_num_parameters": count_params(params),
            "model_dtype": config.compute_dtype,
            "max_length": self.max_length,
        }


@dataclasses.dataclass(frozen=True)
class _Options:
    """The generation options of a request."""

    max_new_tokens: int
    until: tuple[str, ...]
    sampling: SamplingConfig

    @classmethod
    def parse(cls, given: Mapping[str, Any], max_new_tokens: int) -> _Options:
        """Reads them as the harness means them.

        Raises:
          ValueError: an option that changes what is generated and is not known.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), max_new_tokens))
        until = tuple(stop for stop in options.pop("until") if stop)
        max_new_tokens = options.pop("max_gen_toks")
        greedy = not options.pop("do_sample")
        temperature = options.pop("temperature", 1.0)
        sampling = {name: options.pop(name, None) for name in ("top_k", "top_p", "min_p")}
        penalty = options.pop("repetition_penalty", 1.0)
        unknown = {k: v for k, v in options.items() if (k, v) not in _WITHOUT_EFFECT}
        if unknown:
            raise ValueError(f"generation options {unknown} are not known.")
        return cls(
            max_new_tokens,
            until,
            SamplingConfig(
                temperature=0.0 if greedy else float(temperature),
                # 0 turns a filter off.
                **{name: value or None for name, value in sampling.items()},
                repetition_penalty=penalty,
            ),
        )


_WITHOUT_EFFECT = (("num_beams", 1), ("num_return_sequences", 1), ("use_cache", True))


def _progress(total: int, what: str, hidden: bool) -> tqdm.tqdm:
    """A bar on a terminal; nothing elsewhere."""
    return tqdm.tqdm(total=total, desc=what, disable=hidden or None)


def evaluate(
    lm: JaxLM,
    tasks: Sequence[str | dict[str, Any]],
    *,
    task_folder: str | pathlib.Path | Sequence[str | pathlib.Path] | None = None,
    use_cache: str | pathlib.Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Runs tasks of the harness on a model.

    Args:
      lm: the model.
      tasks: names of tasks or groups, or their definitions.
      task_folder: folders with YAML files of further tasks.
      use_cache: answers are kept in the file `<use_cache>_rank0.db`, and taken from there the next
        time.
      **options: of `lm_eval.simple_evaluate`: num_fewshot, limit, apply_chat_template, ...

    Returns:
      The harness's results: "results", "samples", "configs", ...
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folders = [task_folder] if isinstance(task_folder, str | pathlib.Path) else task_folder
    paths = [str(folder) for folder in folders or ()]
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not {task for task in tasks if isinstance(task, str)} <= set(manager.all_subtasks):
        # Reading the harness's thousands of definitions takes some 10 seconds.
        manager = TaskManager(include_path=paths or None)
    return simple_evaluate(
        model=lm,
        tasks=list(tasks),
        task_manager=manager,
        batch_size=lm.batch_size,
        use_cache=None if use_cache is None else str(use_cache),
        **options,
    )
