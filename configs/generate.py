"""Loads a checkpoint and answers prompts.

python -m experiments.launch --config configs/generate.py --config.prompt="Name three colours."
python -m experiments.launch --config configs/generate.py:smollm2          # asks for prompts
python -m experiments.launch --config configs/generate.py --config.model=path/to/checkpoint
python -m experiments.launch --config configs/generate.py:llama3_8b --topology=v5e:2x2  # compiles

`--config.model` is a folder with config.json and safetensors, a .gguf file, a name such as
`smollm2-135m-instruct`, a hub id, or `tiny` for the model of configs/pretrain.py.
"""

import ml_collections
from ml_collections import config_dict

EXPERIMENT = "experiments.generate"
ONE_SHOT = True
VARIANTS = {
    "smollm2": "SmolLM2-135M-Instruct, from a package of the Python package index (93 MB)",
    "tiny": "the model that pretrain:tiny trains (trained first where it is missing; 3 minutes)",
    "llama3_8b": "Llama 3 8B Instruct from the hub (16 GB, needs access)",
}


def get_config(variant: str = "smollm2") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.model = {
        "smollm2": "smollm2-135m-instruct",
        "tiny": "tiny",
        "llama3_8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    }[variant]
    # Another tokenizer than the checkpoint's own: a folder, a file or "byte".
    config.tokenizer = config_dict.placeholder(str)
    # One prompt. Without it: asked for on a terminal, otherwise the examples below.
    config.prompt = config_dict.placeholder(str)
    config.examples = (
        ("What is the capital of France?", "Name three colours.")
        if variant != "tiny"
        else ("def", "import")
    )
    # Whether prompts are a user's messages: "auto" where the checkpoint has a chat template.
    config.chat = "auto"
    config.system = ""
    config.max_new_tokens = 64
    # 0: the most likely token every time.
    config.temperature = 0.0
    # Round the weights of the layers to 8 or 4 bits in groups first; 0 leaves them.
    config.quantize_bits = 0
    config.group_size = 32
    # What --topology compiles: prefill and decoding of one batch, on a mesh of that slice.
    config.compiled = ml_collections.ConfigDict()
    config.compiled.preset = {"smollm2": "smollm2_135m", "tiny": "llama_15m"}.get(variant, variant)
    config.compiled.dtype = "bfloat16"
    config.compiled.batch_size = 8
    config.compiled.prompt_length = 1024
    config.compiled.max_new_tokens = 256
    config.compiled.prefill_chunk = config_dict.placeholder(int)
    config.mesh = ml_collections.ConfigDict({"data": 1, "fsdp": 1, "tensor": -1})
    return config
