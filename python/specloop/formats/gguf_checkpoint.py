"""A GGUF of the llama family as a :class:`Checkpoint`: its tensors by Hugging Face's names."""

import hashlib
import os
import re
from dataclasses import replace

from ..errors import ModelError, show
from ..models.config import LlamaConfig
from ..text.tokenizer import Tokenizer
from .gguf import GGUF
from .tensors import stranger

_FACTORS = "rope_freqs.weight"  # of Llama 3.1's rotary frequencies
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_PAIRED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")


class GGUFCheckpoint:
    def __init__(self, path):
        self.path = os.fspath(path)
        self._file = GGUF.open(path)
        try:
            metadata = self._file.metadata
            self._tokenizer = Tokenizer.from_gguf(metadata)
            self.config = self._told_by_tensors(LlamaConfig.from_gguf(metadata, self._tokenizer.vocab_size))
            self.chat_template = metadata.get("tokenizer.chat_template")
            self._refuse_strangers()
            # llama's q and k have rotary pairs next to each other, as llama.cpp rotates them; others' have not.
            self._paired = metadata.get("general.architecture") == "llama"
            metadata.clear()  # the vocabulary's strings: tens of MB that the weights can have
        except BaseException:
            self._file.close()
            raise

    def _told_by_tensors(self, config):
        """What the metadata leave open: ties, biases that a llama may have, and Llama 3.1's rotary factors."""
        tensors, scaling = self._file.tensors, config.rope_scaling
        if _FACTORS in tensors:
            scaling = {"rope_type": "factors", "factors": self._file.read(_FACTORS).flatten().tolist()}
        biased = config.qkv_bias or "blk.0.attn_q.bias" in tensors
        return replace(config, tied="output.weight" not in tensors, qkv_bias=biased, rope_scaling=scaling)

    def _refuse_strangers(self):
        for own, name in self._by_own_name():
            reason = "no llama has it" if name is None else stranger(name, self.config)
            if reason is not None and own != _FACTORS:
                raise ModelError(f"{self.path}: tensor {show(own)}: {reason}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._file.close()

    def names(self):
        return [name for _, name in self._by_own_name() if name is not None]

    def _by_own_name(self):
        """(name in the file, Hugging Face's name or None)"""
        back = {value: key for key, value in _TOP.items()}
        in_layer = {value: key for key, value in _IN_LAYER.items()}
        for own in self._file.tensors:
            head, _, kind = own.rpartition(".")
            if head in back:
                yield own, f"{back[head]}.{kind}"
            elif (match := re.fullmatch(r"blk\.(\d+)\.(.+)", head)) and match[2] in in_layer:
                yield own, f"model.layers.{match[1]}.{in_layer[match[2]]}.{kind}"
            else:
                yield own, None

    def label(self, name):
        match = _LAYER.fullmatch(name)
        if match and match[2] in _IN_LAYER:
            return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
        head, _, kind = name.rpartition(".")
        return f"{_TOP.get(head, head)}.{kind}"

    def _info(self, name):
        info = self._file.tensors.get(self.label(name))
        if info is None:
            raise ModelError(f"{self.label(name)}: missing from the file")
        return info

    def shape(self, name):
        return tuple(self._info(name).shape)

    def nbytes(self, name):
        return self._info(name).nbytes

    def read_rows(self, name, start, stop):
        rows = self._file.read_rows(self._info(name).name, start, stop)
        return self._half_split(rows) if self._paired and _PAIRED.search(name) else rows

    def read(self, name):
        values = self._file.read(self._info(name).name).reshape(-1)
        return self._half_split(values) if self._paired and _PAIRED.search(name) else values

    def _half_split(self, rows):
        """Whole heads of rows with pairs side by side, to i and i + D / 2 as our kernels pair them."""
        heads = rows.unflatten(0, (-1, self.config.head_dim // 2, 2))
        return heads.transpose(1, 2).reshape(rows.shape)

    def tokenizer(self):
        return self._tokenizer

    def text_data(self):
        with GGUF.open(self.path) as again:  # it was not kept
            found = {key: value for key, value in again.metadata.items() if key.startswith("tokenizer.")}
        return {"kind": "gguf", "metadata": found}

    def identity(self):
        status = os.stat(self.path)
        tensors = [tuple(info) for info in self._file.tensors.values()]
        told = repr((os.path.realpath(self.path), status.st_size, status.st_mtime_ns, tensors))
        return hashlib.sha256(told.encode()).hexdigest()
