"""Pre-trains a decoder: tokenizer, token cache, training, evaluation, samples, report.

The pieces are the library's; this file only reads them from a config. A run that was killed goes on
from its last checkpoint when the same command is given again, and ends with the same numbers.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import jax
import ml_collections
import numpy as np
import optax
from jax.sharding import Mesh

import jaxllm
from experiments import config_files, pretrain_report, report, runtime, text_data
from experiments.errors import Interrupted, UsageError
from jaxllm.compilation.analysis import Work
from jaxllm.data.errors import DataError
from jaxllm.data.files import sha256_json
from jaxllm.data.loader import Loader
from jaxllm.data.rows import PackedRows
from jaxllm.data.tokenizers import Tokenizer
from jaxllm.inference.generate import generate
from jaxllm.models import hf, parameters, presets
from jaxllm.models.config import ModelConfig
from jaxllm.training import (
    balance,
    checkpoints,
    distributed,
    flops,
    loop,
    objectives,
    optimizers,
    sharding,
    state,
    step,
)
from jaxllm.training import evaluate as evaluation

# Part of the recipe hash: raise it when a change of the code changes what a recipe trains.
CODE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training leaves.

    Attributes:
      data: what it was trained and evaluated on.
      evaluation: of the last parameters on the validation split.
    """

    config: ModelConfig
    params: Any
    data: text_data.Prepared
    evaluation: dict[str, float]


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains, writes `model/`, samples and writes the report.

    With several processes all of them train and sample; the first writes and has results.
    """
    trained = train(config, workdir)
    samples = sample(config, trained)
    if not runtime.is_first():
        return {}
    for prompt, continuation in samples:
        print(f"\n--- {prompt!r}\n{prompt}{continuation}")
    print()
    results = pretrain_report.results(
        workdir,
        trained.evaluation,
        parameters.count_params(trained.params),
        pretrain_report.unigram_bits_per_byte(trained.data),
        samples,
    )
    pretrain_report.write(workdir, results)
    print(f"report: {workdir / 'report.md'}")
    return results


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> Trained:
    """Trains or goes on training in the workdir; exports the model to `workdir/model`.

    Raises:
      UsageError: a value of the config that does not fit the data or the devices.
      Interrupted: the process was asked to end; a checkpoint has been written.
    """
    data = text_data.prepare(config)
    tokenizer, valid = data.tokenizer, data.valid
    model = with_special_tokens(model_config(config, data.vocab_size), tokenizer)
    mesh = make_mesh(config)
    batch_size, length = config.data.batch_size, config.data.row_length
    index, count = distributed.row_block(mesh)
    blocks = {"process_index": index, "process_count": count}
    try:
        loader = Loader(PackedRows(data.train, length), batch_size, seed=config.seed, **blocks)
        held_out = Loader(PackedRows(valid, length), batch_size, seed=0, **blocks)
        in_order = Loader(PackedRows(valid, length, shuffle=False), batch_size, **blocks)
    except DataError as error:
        raise UsageError(f"data: {error}") from error
    bytes_per_token = data.valid_bytes / data.valid_targets
    loss = objectives.language_model_loss(model, z_loss=config.train.z_loss)
    plain = objectives.language_model_loss(model)
    eval_step = step.make_eval_step(plain, mesh=mesh)

    def evaluate(params: Any, batches: Any, total_bytes: float | None = None) -> dict[str, float]:
        values = evaluation.evaluate(eval_step, params, batches, mesh=mesh, total_bytes=total_bytes)
        kept = {name: values[name] for name in ("cross_entropy", "perplexity", "accuracy")}
        bits = values["cross_entropy"] / np.log(2) / bytes_per_token
        return kept | {
            "bits_per_byte": values.get("bits_per_byte", bits),
            "tokens": values["tokens"],
        }

    def quick(current: state.TrainState) -> dict[str, float]:
        count = min(config.train.eval_batches, held_out.steps_per_epoch())
        return evaluate(current.params, map(held_out.batch, range(count)))

    terminal = sys.stderr.isatty()
    try:
        result = loop.train(
            loop.LoopConfig(
                steps=config.train.steps,
                log_every=config.train.log_every,
                eval_every=config.train.eval_every,
                checkpoint_every=config.train.checkpoint_every,
                keep=config.train.keep_checkpoints,
                accumulate=config.train.microbatches,
                seed=config.seed,
                skip_nonfinite=config.train.skip_nonfinite,
                progress=terminal,
            ),
            loss=loss,
            params=lambda: parameters.init_params(model, jax.random.key(config.seed)),
            optimizer=make_optimizer(config, model),
            schedule=optimizers.create_schedule(optimizer_config(config).schedule),
            loader=loader,
            workdir=workdir,
            mesh=mesh,
            axes=parameters.logical_axes(model) if mesh is not None else None,
            evaluate=quick,
            flops_per_token=flops.flops_per_token(model, length),
            extra_writers=() if terminal else (ConsoleWriter(config.train.steps),),
        )
    except loop.NonFiniteError as error:
        raise UsageError(f"{error} Try a lower optimizer.peak or more warm-up.") from error
    except checkpoints.CheckpointError as error:
        raise UsageError(str(error)) from error
    if result.interrupted:
        raise Interrupted(f"saved step {int(result.state.step)}; the same command goes on.")
    params = result.state.params
    limit = config.train.final_eval_batches or None
    if limit:
        final = evaluate(params, map(held_out.batch, range(min(limit, held_out.steps_per_epoch()))))
    else:
        final = evaluate(params, in_order.eval_batches(), float(data.valid_bytes))
    export(workdir, model, params, tokenizer)
    if runtime.is_first():
        report.write_json(workdir / "recipe.json", {"recipe": recipe_hash(config)})
    return Trained(model, params, data, final)


def sample(config: ml_collections.ConfigDict, trained: Trained) -> list[tuple[str, str]]:
    """(prompt, continuation) for every prompt of the config."""
    tokenizer = trained.data.tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in config.sample.prompts]
    continuations = generate(
        trained.config,
        trained.params,
        prompts,
        max_new_tokens=config.sample.max_new_tokens,
        temperature=config.sample.temperature,
        key=jax.random.key(config.seed),
    )
    texts = [tokenizer.decode(ids, skip_special=True) for ids in continuations]
    return list(zip(config.sample.prompts, texts, strict=True))


def recipe_hash(config: ml_collections.ConfigDict) -> str:
    """Hash of all that a trained model depends on: config, texts, code and library versions."""
    values = config_files.to_json(config)
    values.pop("sample")
    return sha256_json(
        {
            "config": values,
            "data": text_data.describe(config.data),
            "code": CODE_VERSION,
            "jaxllm": jaxllm.__version__,
        }
    )


def model_config(config: ml_collections.ConfigDict, vocab_size: int) -> ModelConfig:
    """The network of a config, for a tokenizer with so many tokens.

    Raises:
      UsageError: an unknown preset, a network that does not fit together or is too small for the
        tokenizer.
    """
    options = config.model
    try:
        if not options.preset:
            return ModelConfig(
                vocab_size=vocab_size,
                embed_dim=options.embed_dim,
                num_layers=options.num_layers,
                num_heads=options.num_heads,
                num_kv_heads=options.num_kv_heads,
                mlp_dim=options.mlp_dim,
                max_positions=config.data.row_length,
                tie_embeddings=True,
                param_dtype=options.param_dtype,
                compute_dtype=options.compute_dtype,
                remat=options.remat,
            )
        model = presets.preset(options.preset)
    except (KeyError, ValueError) as error:
        raise UsageError(f"model: {error.args[0]}") from error
    if vocab_size > model.vocab_size:
        raise UsageError(
            f"the tokenizer has {vocab_size} tokens, model.preset={options.preset} only "
            f"{model.vocab_size}; choose a tokenizer by --config.tokenizer.path."
        )
    try:
        return model.replace(
            max_positions=max(model.max_positions, config.data.row_length),
            remat=options.remat or model.remat,
        )
    except ValueError as error:
        raise UsageError(f"model: {error.args[0]}") from error


def optimizer_config(config: ml_collections.ConfigDict) -> optimizers.OptimizerConfig:
    """The optimizer of a config, with a schedule over its steps."""
    options = config.optimizer
    try:
        return optimizers.OptimizerConfig(
            name=options.name,
            schedule=optimizers.ScheduleConfig(
                name=options.schedule,
                peak=options.peak,
                warmup_steps=int(options.warmup_fraction * config.train.steps),
                total_steps=config.train.steps,
                decay_steps=max(1, config.train.steps // 5) if options.schedule == "wsd" else None,
                end_fraction=options.end_fraction,
            ),
            weight_decay=options.weight_decay,
            b2=options.b2,
            adam_scale=options.adam_scale,
            clip_norm=options.clip_norm or None,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_optimizer(
    config: ml_collections.ConfigDict, model: ModelConfig
) -> optax.GradientTransformation:
    """The optimizer of a config for a network; it also balances the routers of a mixture."""
    return balance.balance_routers(optimizers.create_optimizer(optimizer_config(config)), model)


def make_mesh(config: ml_collections.ConfigDict) -> Mesh | None:
    """The mesh of a config; None on a single device.

    Raises:
      UsageError: the mesh does not fit the number of devices.
    """
    if jax.device_count() == 1:
        return None
    try:
        return sharding.create_mesh(sharding.MeshConfig(**config.mesh))
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error


def lower_steps(
    config: ml_collections.ConfigDict, mesh: Mesh | None = None
) -> dict[str, jax.stages.Lowered]:
    """Lowers the training step of a config from shapes alone: nothing is allocated.

    Args:
      config: of this experiment. The vocabulary is what it trains, or the preset's.
      mesh: devices, which may be those of a slice described by `jax.experimental.topologies`.

    Raises:
      UsageError: the batch does not divide over the mesh.
    """
    model = _untrained_model(config)
    optimizer = make_optimizer(config, model)
    abstract = state.abstract_state(
        lambda: parameters.init_params(model, jax.random.key(0)),
        optimizer,
        mesh=mesh,
        axes=parameters.logical_axes(model) if mesh is not None else None,
    )
    shape = (config.data.batch_size, config.data.row_length)
    try:
        placed = None if mesh is None else sharding.batch_sharding(shape, mesh)
    except ValueError as error:
        raise UsageError(f"data.batch_size={shape[0]}: {error}") from error
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    dtypes |= {"segment_ids": "int32", "positions": "int32"}
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for name, dtype in dtypes.items()
    }
    loss = objectives.language_model_loss(model, z_loss=config.train.z_loss)
    train_step = step.make_train_step(
        loss, optimizer, mesh=mesh, accumulate=config.train.microbatches
    )
    return {"train_step": train_step.lower(abstract, batch)}


def step_work(config: ml_collections.ConfigDict) -> dict[str, Work]:
    """What each of `lower_steps` is for: parameters, tokens and operations."""
    model = _untrained_model(config)
    rows, length = config.data.batch_size, config.data.row_length
    work = Work(
        params=parameters.count_params(parameters.abstract_params(model)),
        tokens=rows * length,
        flops_per_token=flops.flops_per_token(model, length),
        microbatches=config.train.microbatches,
        rows=rows,
        remat=model.remat,
    )
    return {"train_step": work}


def _untrained_model(config: ml_collections.ConfigDict) -> ModelConfig:
    return model_config(config, 1 if config.model.preset else config.tokenizer.vocab_size)


def with_special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The config with the tokenizer's special tokens, so that generation knows where to stop."""
    return model.replace(
        bos_token_id=tokenizer.bos_id,
        eos_token_ids=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
        pad_token_id=tokenizer.pad_id,
    )


def export(workdir: pathlib.Path, model: ModelConfig, params: Any, tokenizer: Tokenizer) -> None:
    """Writes `model/` in the layout of Hugging Face, with the tokenizer where it can be saved.

    With several processes all take part: one tensor after the other is gathered and written by the
    first.
    """
    source = None
    if hasattr(tokenizer, "save"):
        source = workdir / "tokenizer"
        if runtime.is_first():
            tokenizer.save(source)
    hf.save_hf(workdir / "model", model, params, tokenizer_from=source, overwrite=True)


class ConsoleWriter:
    """Prints a line at every evaluation, for runs without a terminal to draw a progress bar on."""

    def __init__(self, steps: int):
        self._steps = steps
        self._last: dict[str, float] = {}

    def write_scalars(self, step: int, scalars: dict[str, Any]) -> None:
        self._last |= scalars
        if "eval/cross_entropy" in scalars:
            shown = {
                "train": self._last.get("train/loss", float("nan")),
                "valid": scalars["eval/cross_entropy"],
                "bits per byte": scalars["eval/bits_per_byte"],
                "tokens/s": self._last.get("train/tokens_per_second", float("nan")),
            }
            text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
            print(f"step {step}/{self._steps}: {text}", flush=True)

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        """Prints nothing."""

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""
