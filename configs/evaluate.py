"""Runs tasks of lm-evaluation-harness on a checkpoint, with intervals that hold for small ones.

python -m experiments.launch --config configs/evaluate.py
python -m experiments.launch --config configs/evaluate.py:standard --config.limit=100
python -m experiments.launch --config configs/evaluate.py --config.model=path/to/checkpoint \
    --config.tasks="('my_task',)" --config.task_folder=folder/with/yaml

Needs the extra `eval`. `--config.model` is what configs/generate.py takes. The harness's own files
(results and every answer) go to `lm_eval` in the workdir.
"""

import ml_collections
from ml_collections import config_dict

EXPERIMENT = "experiments.evaluate"
ONE_SHOT = True
VARIANTS = {
    "tiny": "which line of Python comes next, offline, with the model that pretrain:tiny trains",
    "smollm2": "the same with SmolLM2-135M-Instruct (93 MB); some 10 minutes on 2 CPU cores",
    "standard": "ARC, HellaSwag, PIQA, LAMBADA and GSM8K from the Hugging Face hub, with SmolLM2",
}


def get_config(variant: str = "tiny") -> ml_collections.ConfigDict:
    """The config of a variant; every key can be overridden as --config.key=value."""
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.model = "tiny" if variant == "tiny" else "smollm2-135m-instruct"
    config.tokenizer = config_dict.placeholder(str)
    config.quantize_bits = 0
    config.group_size = 32
    # Whether prompts become messages of a chat: auto, always or never.
    config.chat = "never"
    # Names of the harness's tasks or groups; `python_next_line` is made from the standard library.
    config.tasks = ("python_next_line",)
    if variant == "standard":
        config.tasks = ("arc_easy", "hellaswag", "piqa", "lambada_openai", "gsm8k")
    # A folder with YAML files of further tasks.
    config.task_folder = config_dict.placeholder(str)
    # Examples before each question; -1 = as the task says.
    config.num_fewshot = -1
    # Questions of each task; 0 = all.
    config.limit = 0
    config.batch_size = 16
    # Tokens of the longest input; 0 = the model's.
    config.max_length = 0
    # The documents' field that names their source, where several questions share one; "" = none.
    config.cluster_by = "source" if variant != "standard" else ""
    # One minus the level of the intervals.
    config.alpha = 0.05
    return config
