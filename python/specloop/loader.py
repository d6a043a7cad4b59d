"""From a file to a model: reads rows on demand, packs them, and never holds more than one block of float weights."""

import torch

import specdec_kernels as sk

from .errors import ModelError, OptionError
from .formats.gguf import GGUF
from .formats.locate import find_model
from .models.cache import DTYPES as CACHES
from .models.config import LlamaConfig
from .models.llama import Layer, Llama, int8_form
from .text.tokenizer import Tokenizer

BLOCK_BYTES = 4 << 20  # float32 bytes of rows that are read, repacked and dropped at a time
DTYPES = ("int8", "f32")


def load_model(name, *, dtype="int8", kv="int8", context=2048, device="cpu", progress=None):
    """Loads a GGUF of the llama architecture: returns (model, tokenizer, chat template or None).

    ``name``: "smollm2" or a path. ``dtype``: "int8" (group-wise codes) or "f32". ``kv``: what the cache holds, "int8",
    "f16" or "f32". ``device``: "cpu", "cuda", or "auto" (a GPU if one can be used). ``progress(fraction)`` is called
    with 0 .. 1. Raises ModelError (unknown model, architecture, shapes), FormatError (malformed file), OptionError.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if kv not in CACHES:
        raise ModelError(f"kv: expected one of {', '.join(CACHES)}, got {kv!r}")
    device = choose_device(device)
    path = find_model(name)
    with GGUF.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        config = LlamaConfig.from_gguf(file.metadata, tokenizer.vocab_size)
        template = file.metadata.get("tokenizer.chat_template")
        file.metadata.clear()  # the vocabulary's strings: tens of MB that the weights can have
        model = _Reader(file, config, dtype, progress).model(context, kv, tokenizer.eos_ids, str(name))
    return model.to(device), tokenizer, template


def choose_device(name):
    """ "cpu" or "cuda" for what the user asked for. Raises OptionError where a GPU is asked for that can't be used."""
    if name == "cpu":
        return name
    reason = f"this torch ({torch.__version__}) sees none"
    if torch.cuda.is_available():
        status = {backend: sk.backends()[backend] for backend in ("cuda", "hip", "triton")}
        if any(state["usable"] for state in status.values()):
            return "cuda"
        reason = "; ".join(f"{backend}: {state['reason']}" for backend, state in status.items())
    if name == "cuda":
        raise OptionError(f"device: expected a GPU for 'cuda', but {reason}")
    return "cpu"


class _Reader:
    def __init__(self, file, config, dtype, progress):
        self.file, self.config, self.dtype = file, config, dtype
        self.progress = progress or (lambda fraction: None)
        self.total = sum(info.nbytes for info in file.tensors.values()) or 1
        self.done = 0
        self.memory = sk.LargePages()  # all matrices in one stretch, as a pass reads them
        self.unfilled = []  # (write function, width, parts) of the matrices that model() has laid out

    def model(self, context, cache, eos_ids, name):
        """Lays out every matrix, then fills them: temporaries among lasting allocations would leave holes between them
        (a tenth of the resident memory), and a missing tensor is found before any work is done.
        """
        c, attention, kv = (
            self.config,
            self.config.heads * self.config.head_dim,
            self.config.kv_heads * self.config.head_dim,
        )
        embedding = self.matrix(c.hidden, ("token_embd.weight", c.vocab))
        layers = []
        for i in range(c.layers):
            blk = f"blk.{i}."
            layers.append(
                Layer(
                    attention_norm=self.vector(blk + "attn_norm.weight"),
                    qkv=self.matrix(
                        c.hidden,
                        (blk + "attn_q.weight", attention),
                        (blk + "attn_k.weight", kv),
                        (blk + "attn_v.weight", kv),
                    ),
                    attention_out=self.matrix(attention, (blk + "attn_output.weight", c.hidden)),
                    mlp_norm=self.vector(blk + "ffn_norm.weight"),
                    gate_up=self.matrix(
                        c.hidden, (blk + "ffn_gate.weight", c.intermediate), (blk + "ffn_up.weight", c.intermediate)
                    ),
                    down=self.matrix(c.intermediate, (blk + "ffn_down.weight", c.hidden)),
                )
            )
        tied = "output.weight" not in self.file.tensors
        head = embedding if tied else self.matrix(c.hidden, ("output.weight", c.vocab))
        norm = self.vector("output_norm.weight")
        for write, width, parts in self.unfilled:
            start = 0
            for block in self._blocks(width, parts):
                write(start, block)
                start += len(block)
        self.progress(1.0)
        return Llama(c, embedding, layers, norm, head, context=context, kv=cache, eos_ids=eos_ids, name=name)

    def vector(self, name):
        self._expect(name, (self.config.hidden,))
        return self.file.read(name).reshape(-1)

    def matrix(self, width, *parts):
        """The named matrices ([rows, width] each) one below the other; still empty."""
        for name, rows in parts:
            self._expect(name, (rows, width))
        total = sum(rows for _, rows in parts)
        if self.dtype == "int8":
            group, rotated = int8_form(width)
            weight = sk.Int8Weight.empty(total, width, group, rotated=rotated, memory=self.memory)
            write = weight.write_rows
        else:
            weight = self.memory.empty((total, width), torch.float32)
            write = lambda start, rows: weight[start : start + len(rows)].copy_(rows)
        self.unfilled.append((write, width, parts))
        return weight

    def _blocks(self, width, parts):
        """Rows of all parts in order, in blocks whose length is a multiple of 64 (but for the last)."""
        pending, height = [], 0
        for name, rows in parts:
            step = max(self.config.head_dim, BLOCK_BYTES // (4 * width) // self.config.head_dim * self.config.head_dim)
            for first in range(0, rows, step):
                stop = min(first + step, rows)
                block = self.file.read_rows(name, first, stop)
                if name.endswith(("attn_q.weight", "attn_k.weight")):
                    block = self._half_split(block)
                self.done += self.file.tensors[name].nbytes * (stop - first) / rows
                self.progress(min(1.0, self.done / self.total))
                pending.append(block)
                height += len(block)
                if height % 64 == 0:
                    yield pending[0] if len(pending) == 1 else torch.cat(pending)
                    pending, height = [], 0
        if pending:
            yield torch.cat(pending)

    def _half_split(self, rows):
        """GGUF stores llama's q and k with rotary pairs next to each other; our kernels pair i with i + D / 2."""
        heads = rows.unflatten(0, (-1, self.config.head_dim // 2, 2))
        return heads.transpose(1, 2).reshape(rows.shape)

    def _expect(self, name, shape):
        info = self.file.tensors.get(name)
        if info is None:
            raise ModelError(f"{name}: missing from the file")
        if tuple(info.shape) != shape:
            raise ModelError(f"{name}: expected shape {list(shape)}, got {list(info.shape)}")
