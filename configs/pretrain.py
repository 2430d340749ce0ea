"""Pre-trains a decoder on text, samples from it and draws its loss curves.

python -m experiments.launch --config configs/pretrain.py
python -m experiments.launch --config configs/pretrain.py:text --config.data.path=my_notes.txt
python -m experiments.launch --config configs/pretrain.py:llama3_8b \\
    --config.data.path=corpus.jsonl --config.tokenizer.path=Meta-Llama-3-8B

`tiny` needs no download: it trains a BPE tokenizer and a Llama of 3 million parameters on the
sources of Python's standard library (see jaxllm/data/stdlib.py).
"""

import ml_collections
from ml_collections import config_dict

EXPERIMENT = "experiments.pretrain"
MULTI_PROCESS = True
VARIANTS = {
    "tiny": "3 M Llama, 4k BPE, on the sources of Python itself; about 3 minutes on 2 CPU cores",
    "text": "the same network on your text or JSONL: --config.data.path=FILE",
    "llama3_8b": "Llama 3 8B on a slice (fsdp 16 x tensor 4), tokenizer and text by path",
    "llama3_70b": "Llama 3 70B on a slice (fsdp 32 x tensor 8), tokenizer and text by path",
    "mixtral_8x7b": "Mixtral 8x7B on a slice (fsdp 16 x expert 4), tokenizer and text by path",
    "olmoe_7b": "OLMoE 1B-7B on a slice (fsdp 4 x expert 16), tokenizer and text by path",
}


def get_config(variant: str = "tiny") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    config = ml_collections.ConfigDict()
    config.seed = 0

    # A preset of jaxllm.models.presets, or "" for the network described here.
    config.model = ml_collections.ConfigDict()
    config.model.preset = ""
    config.model.embed_dim = 192
    config.model.num_layers = 6
    config.model.num_heads = 6
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 512
    config.model.param_dtype = "float32"
    config.model.compute_dtype = "float32"
    config.model.remat = "none"

    # A tokenizer to load (folder, file or "byte"), or none: train a BPE on the training text.
    config.tokenizer = ml_collections.ConfigDict()
    config.tokenizer.path = config_dict.placeholder(str)
    config.tokenizer.vocab_size = 4096

    # Text files hold one document, JSONL files one a line in the given field. Without a
    # validation file, `valid_fraction` of the documents (or of one file's end) is held out.
    config.data = ml_collections.ConfigDict()
    config.data.path = config_dict.placeholder(str)
    config.data.valid_path = config_dict.placeholder(str)
    config.data.field = "text"
    # Or a task registered in seqio: its name, the module (or module:function) that registers it,
    # and its splits for training and validation. Its tokens are decoded by tokenizer.path.
    config.data.seqio_task = config_dict.placeholder(str)
    config.data.seqio_register = config_dict.placeholder(str)
    config.data.seqio_splits = ("train", "validation")
    config.data.valid_fraction = 0.05
    config.data.row_length = 256
    config.data.batch_size = 8

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.name = "muon"
    config.optimizer.peak = 0.015
    # Muon: embeddings, norms and head go by Adam, at this multiple of the learning rate.
    config.optimizer.adam_scale = 1.0
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_fraction = 0.07
    config.optimizer.end_fraction = 0.1
    config.optimizer.weight_decay = 0.1
    config.optimizer.b2 = 0.95
    config.optimizer.clip_norm = 1.0

    config.train = ml_collections.ConfigDict()
    config.train.steps = 180
    config.train.microbatches = 1
    config.train.z_loss = 0.0
    config.train.log_every = 10
    config.train.eval_every = 30
    config.train.eval_batches = 8
    # Batches of the last evaluation; 0 takes the whole validation split.
    config.train.final_eval_batches = 32
    config.train.checkpoint_every = 60
    config.train.keep_checkpoints = 2
    # Steps in a row with a loss or gradient that is not finite, which are left out; one more stops.
    config.train.skip_nonfinite = 0

    # Devices along each mesh axis; -1 takes what is left.
    config.mesh = ml_collections.ConfigDict()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.tensor = 1
    config.mesh.expert = 1
    config.mesh.context = 1

    config.sample = ml_collections.ConfigDict()
    # Without a space at the end: to the tokenizer it belongs to the next word.
    config.sample.prompts = ("def", "import", "class", "if __name__ ==", '    """Return')
    config.sample.max_new_tokens = 60
    config.sample.temperature = 0.7

    if variant == "text":
        config.sample.prompts = ("The", "In", "A")
    elif variant != "tiny":
        _large(config, variant)
    return config


# Peak learning rate, z-loss coefficient, what the backward pass recomputes ("" = the preset's own;
# of a mixture all, or the products of every expert would be kept), and the mesh axis that is fixed
# (fsdp takes the rest).
_LARGE = {
    "llama3_8b": (3e-4, 0.0, "", {"tensor": 4}),
    "llama3_70b": (1.5e-4, 0.0, "", {"tensor": 8}),
    "mixtral_8x7b": (3e-4, 0.0, "full", {"expert": 4}),
    "olmoe_7b": (4e-4, 1e-5, "full", {"expert": 16}),
}


def _large(config: ml_collections.ConfigDict, variant: str) -> None:
    """A preset on a slice of accelerators."""
    peak, z_loss, remat, axes = _LARGE[variant]
    config.model.preset = variant
    config.model.remat = remat
    config.data.row_length = 4096
    config.data.batch_size = 256
    config.optimizer.name = "adamw"
    config.optimizer.peak = peak
    config.optimizer.warmup_fraction = 0.02
    config.train.steps = 100_000
    config.train.z_loss = z_loss
    config.train.eval_every = 1000
    config.train.checkpoint_every = 1000
    config.sample.prompts = ("The capital of France is", "def fibonacci(n):")
    config.mesh.update(axes)
