"""From a file to a model: reads rows on demand, packs them, and never holds more than one block of float weights."""

import itertools

import torch

import specdec_kernels as sk

from .errors import ModelError, OptionError
from .formats.gguf import GGUF
from .formats.locate import find_model
from .models.balance import find_balance
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


def needs_balance(dtype):
    """Whether factors between tensors (models/balance.py) make a difference; float32 they would not change by a bit."""
    return dtype == "int8"


class _Reader:
    def __init__(self, file, config, dtype, progress):
        self.file, self.config, self.dtype = file, config, dtype
        self.progress = progress or (lambda fraction: None)
        self.total = sum(info.nbytes for info in file.tensors.values()) or 1
        self.done = 0
        self.memory = sk.LargePages()  # all matrices in one stretch, as a pass reads them
        self.unfilled = []  # (write function, width, parts, factors of columns) per matrix that model() has laid out

    def model(self, context, cache, eos_ids, name):
        """Lays out every matrix, then fills them: temporaries among lasting allocations would leave holes between them
        (a tenth of the resident memory), and a missing tensor is found before any work is done.
        """
        c = self.config
        embedding = self.matrix(c.hidden, ("token_embd.weight", c.vocab))
        norms = [[self.vector(f"blk.{i}.{name}_norm.weight") for name in ("attn", "ffn")] for i in range(c.layers)]
        norm = self.vector("output_norm.weight")
        balance = find_balance([*itertools.chain(*norms), norm], c) if needs_balance(self.dtype) else None
        layers = [self.layer(i, *norms[i], balance and balance[i]) for i in range(c.layers)]
        tied = "output.weight" not in self.file.tensors
        head = embedding if tied else self.matrix(c.hidden, ("output.weight", c.vocab))
        for write, width, parts, columns in self.unfilled:
            start = 0
            for block in self._blocks(width, parts, columns):
                write(start, block)
                start += len(block)
        self.progress(1.0)
        return Llama(c, embedding, layers, norm, head, context=context, kv=cache, eos_ids=eos_ids, name=name)

    def layer(self, i, attention_norm, mlp_norm, balance):
        """``balance``: a LayerBalance, or None."""
        c, blk = self.config, f"blk.{i}."
        attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        before_qkv = before_gate_up = before_down = before_out = of_v = of_up = None
        if balance is not None:
            before_qkv, before_gate_up, before_down = balance.qkv, balance.gate_up, balance.down
            before_out = balance.attention_out(c)
            of_v, of_up = 1 / balance.values, 1 / balance.down
            attention_norm, mlp_norm = attention_norm / before_qkv, mlp_norm / before_gate_up
        q, k, v = ((blk + f"attn_{name}.weight", rows) for name, rows in (("q", attention), ("k", kv), ("v", kv)))
        gate, up = ((blk + f"ffn_{name}.weight", c.intermediate) for name in ("gate", "up"))
        return Layer(
            attention_norm=attention_norm,
            qkv=self.matrix(c.hidden, q, k, (*v, of_v), columns=before_qkv),
            attention_out=self.matrix(attention, (blk + "attn_output.weight", c.hidden), columns=before_out),
            mlp_norm=mlp_norm,
            gate_up=self.matrix(c.hidden, gate, (*up, of_up), columns=before_gate_up),
            down=self.matrix(c.intermediate, (blk + "ffn_down.weight", c.hidden), columns=before_down),
        )

    def vector(self, name):
        self._expect(name, (self.config.hidden,))
        return self.file.read(name).reshape(-1)

    def matrix(self, width, *parts, columns=None):
        """The named matrices, (name, rows) or (name, rows, their factors), one below the other; still empty.

        ``columns``: factors of the columns. Factors of None are 1.
        """
        for name, rows, *_ in parts:
            self._expect(name, (rows, width))
        total = sum(rows for _, rows, *_ in parts)
        if self.dtype == "int8":
            group, rotated = int8_form(width)
            weight = sk.Int8Weight.empty(total, width, group, rotated=rotated, memory=self.memory)
            write = weight.write_rows
        else:
            weight = self.memory.empty((total, width), torch.float32)
            write = lambda start, rows: weight[start : start + len(rows)].copy_(rows)
        self.unfilled.append((write, width, parts, columns))
        return weight

    def _blocks(self, width, parts, columns):
        """Rows of all parts in order, in blocks whose length is a multiple of 64 (but for the last)."""
        pending, height = [], 0
        for name, rows, *factors in parts:
            step = max(self.config.head_dim, BLOCK_BYTES // (4 * width) // self.config.head_dim * self.config.head_dim)
            for first in range(0, rows, step):
                stop = min(first + step, rows)
                block = self.file.read_rows(name, first, stop)
                if name.endswith(("attn_q.weight", "attn_k.weight")):
                    block = self._half_split(block)
                if columns is not None:
                    block = block * columns
                if factors and factors[0] is not None:
                    block = block * factors[0][first:stop, None]
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
