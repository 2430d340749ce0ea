"""Loads a checkpoint and answers prompts.

python -m experiments.launch --config configs/generate.py --config.prompt="Name three colours."
python -m experiments.launch --config configs/generate.py:smollm2          # asks for prompts
python -m experiments.launch --config configs/generate.py --config.model=path/to/checkpoint

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
}


def get_config(variant: str = "smollm2") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.model = {"smollm2": "smollm2-135m-instruct", "tiny": "tiny"}[variant]
    # Another tokenizer than the checkpoint's own: a folder, a file or "byte".
    config.tokenizer = config_dict.placeholder(str)
    # One prompt. Without it: asked for on a terminal, otherwise the examples below.
    config.prompt = config_dict.placeholder(str)
    config.examples = (
        ("What is the capital of France?", "Name three colours.")
        if variant == "smollm2"
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
    return config
