"""The ``tokenizers`` library's byte-pair encoding over the same vocabulary: what ours has to equal."""

import tokenizers
from tokenizers import models

from specloop.text.tokenizer import _PRE_TOKENIZERS


def model(ids, merges, *, whole_words=False):
    """The library's model: ids by token, merges as "left right"."""
    return models.BPE(dict(ids), [tuple(merge.split(" ")) for merge in merges], ignore_merges=whole_words)


def of_metadata(metadata):
    """A tokenizer of the library without special tokens, of a GGUF's metadata."""
    get = lambda name: metadata[f"tokenizer.ggml.{name}"]
    ids = {
        token: id for id, (token, kind) in enumerate(zip(get("tokens"), get("token_type"), strict=True)) if kind == 1
    }
    built = tokenizers.Tokenizer(model(ids, get("merges"), whole_words=get("pre") == "llama-bpe"))
    built.pre_tokenizer = _PRE_TOKENIZERS[get("pre")]()
    if get("pre") == "qwen2":
        built.normalizer = tokenizers.normalizers.NFC()
    return built
