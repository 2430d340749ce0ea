"""Tokenizers, sources, token caches, and batches as a pure function of the step.

    tokenizer = load_tokenizer("byte")
    cache = build_cache("caches", "demo", {"train": TextFiles("*.txt")},
                        LanguageModeling(tokenizer), tokenizer)
    loader = Loader(PackedRows(cache.split("train"), row_length=256), batch_size=8, seed=0)
    batch = loader.batch(step=0)

Importing this package loads neither TensorFlow, seqio nor `datasets`; what needs them imports
them when called.
"""

from jaxllm.data.bpe import train_bpe
from jaxllm.data.byte_tokenizer import ByteTokenizer
from jaxllm.data.cache import TokenCache, TokenSplit, open_cache
from jaxllm.data.cache_builder import build_cache
from jaxllm.data.chat import ChatError, ChatTemplate, encode_chat, load_chat_template
from jaxllm.data.errors import CacheError, DataError, RecordError, TokenizerError
from jaxllm.data.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.data.hf_tokenizer import HuggingFaceTokenizer
from jaxllm.data.loader import Loader, check_fingerprint
from jaxllm.data.mixture import Mixture
from jaxllm.data.preprocessors import (
    Conversation,
    Keep,
    LanguageModeling,
    Preference,
    PromptResponse,
    forget_retain,
    make_preprocessor,
    normalize_messages,
)
from jaxllm.data.rows import PackedRows, PartRows, Rows, ZippedRows
from jaxllm.data.sentencepiece_tokenizer import SentencePieceTokenizer
from jaxllm.data.seqio_build import build_seqio_cache
from jaxllm.data.sources import (
    Examples,
    HuggingFaceDataset,
    JsonLines,
    Parquet,
    Source,
    TextFiles,
)
from jaxllm.data.stdlib import StandardLibrary
from jaxllm.data.tasks import Task, mixture_rates, register, register_mixture, to_seqio
from jaxllm.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "CacheError",
    "ChatError",
    "ChatTemplate",
    "Conversation",
    "DataError",
    "Examples",
    "HuggingFaceDataset",
    "HuggingFaceTokenizer",
    "JsonLines",
    "Keep",
    "LanguageModeling",
    "Loader",
    "Mixture",
    "PackedRows",
    "Parquet",
    "PartRows",
    "Preference",
    "PromptResponse",
    "RecordError",
    "Rows",
    "SentencePieceTokenizer",
    "Source",
    "StandardLibrary",
    "Task",
    "TextFiles",
    "TokenCache",
    "TokenSplit",
    "Tokenizer",
    "TokenizerError",
    "ZippedRows",
    "build_cache",
    "build_seqio_cache",
    "check_fingerprint",
    "encode_chat",
    "forget_retain",
    "load_chat_template",
    "load_tokenizer",
    "make_preprocessor",
    "mixture_rates",
    "normalize_messages",
    "open_cache",
    "register",
    "register_mixture",
    "to_seqio",
    "tokenizer_from_gguf",
    "train_bpe",
]
