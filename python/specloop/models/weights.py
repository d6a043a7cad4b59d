"""A model's weights as a pass over them sees them: blocks in order, in memory or as they come from a file."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

import specdec_kernels as sk

from ..errors import translated

NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
VECTORS = frozenset((*NORMS, "qkv_bias"))
NAMES = {torch.int8: "int8", torch.bfloat16: "bf16", torch.float32: "f32"}  # of a matrix' values


@dataclass
class Layer:
    """Weights of one block: ``Int8Weight``, float32 or bfloat16 [N, K] matrices, float32 vectors."""

    attention_norm: torch.Tensor
    qkv: object
    attention_out: object
    mlp_norm: torch.Tensor
    gate_up: object
    down: object
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None

    def parts(self):
        """What it holds, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: part for name, part in named if part is not None}


def norms_of(pack):
    """All RMS norms' vectors of a pack, float32, layer by layer in the order of ``NORMS``, then the last one."""
    with translated():
        for index in pack.order:
            for name in (*NORMS, "norm"):
                if name in pack.blocks[index].parts:
                    yield pack.read_vector(index, name).float()


class Head(NamedTuple):
    """Rows ``start`` to ``stop`` of the head. The first part of a head has the norm in front of it, the others None."""

    start: int
    stop: int
    weight: object
    norm: torch.Tensor | None


class Resident:
    """All weights in memory. ``embedding`` is [vocab, hidden]; ``head`` is the same object where they are tied."""

    streams, streamed_bytes, budget = False, 0, None

    def __init__(self, embedding, layers, norm, head):
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head
        self.device = norm.device
        self.nbytes = self.all_nbytes = sum(part.nbytes for part in self._unique())
        self._body = tuple(enumerate(layers))
        self._whole = (*self._body, (len(layers), Head(0, head.shape[0], head, norm)))

    def _unique(self):
        matrices = {id(m): m for m in (self.embedding, self.head)}.values()  # one, if they are tied
        return [*matrices, *(part for layer in self.layers for part in layer.parts().values()), self.norm]

    def pieces(self, with_head):
        """(key, blocks) in the order of a pass: blocks that are there together, as (index, Layer or Head) pairs.

        Where there is a key, blocks under that key are always the same memory, so what is done with them can be
        captured. A piece is valid until the next one is asked for. ``with_head`` False: the layers only.
        """
        yield ("all", with_head), self._whole if with_head else self._body

    @property
    def dtype(self):
        """What matrices hold: "int8", "bf16" or "f32"."""
        return NAMES[torch.int8 if isinstance(self.head, sk.Int8Weight) else self.head.dtype]

    @property
    def last_norm(self):
        """The norm in front of the head."""
        return self.norm

    def norms(self):
        """All RMS norms' vectors, float32, in the order of ``NORMS`` layer by layer, then the last one."""
        for layer in self.layers:
            parts = layer.parts()
            yield from (parts[name] for name in NORMS if name in parts)
        yield self.norm

    @property
    def embeds_in_place(self):
        """Whether ``embed`` always reads the same memory, by calls that can be recorded."""
        return isinstance(self.embedding, sk.Int8Weight)

    def embed(self, ids, out):
        """The float32 rows ``ids`` (int64 [n]) of the embedding."""
        if isinstance(self.embedding, sk.Int8Weight):
            self.embedding.rows(ids, out=out)
        elif self.embedding.dtype is torch.float32:
            torch.index_select(self.embedding, 0, ids, out=out)
        else:
            out.copy_(self.embedding[ids])

    def to(self, device):
        matrices = {id(m): m.to(device) for m in (self.embedding, self.head)}
        layers = [Layer(**{name: part.to(device) for name, part in layer.parts().items()}) for layer in self.layers]
        return Resident(matrices[id(self.embedding)], layers, self.norm.to(device), matrices[id(self.head)])

    @property
    def memory_nbytes(self):
        return self.nbytes

    def drop_slot(self):
        return 0

    drop_block = grow = drop_slot

    def close(self):
        self.embedding = self.norm = self.head = None
        self.layers, self._body, self._whole = [], (), ()


class Streamed:
    """Weights of an open :class:`specdec_kernels.stream.WeightStream`, which it closes in the end.

    The blocks are named as ``specloop.convert`` names them: "layer.0", "layer.1", ..., "head.0", ... ``whole(pack)``
    opens the stream that ``grow`` puts in the place of this one, which has less memory than its budget allows.
    """

    def __init__(self, stream, device="cpu", *, budget=None, whole=None):
        self.stream, self.device, self.budget, self._whole = stream, torch.device(device), budget, whole
        self._streamed_before = 0  # by streams that were here before
        pack = stream.pack
        self._layers = {index: int(name[6:]) for index, name in self._named(pack, "layer.")}
        self._body = [index for index in pack.order if index in self._layers]
        self._heads, start = {}, 0  # block index -> (start, stop)
        for block, part in pack.matrices["head"]:
            stop = start + pack.blocks[block].parts[part].shape[0]
            self._heads[block] = start, stop
            start = stop

    @staticmethod
    def _named(pack, prefix):
        return [(index, pack.blocks[index].name) for index in pack.order if pack.blocks[index].name.startswith(prefix)]

    @property
    def streams(self):
        return self.stream.stats.active

    @property
    def nbytes(self):
        return self.stream.stats.resident_bytes

    @property
    def all_nbytes(self):
        return sum(self.stream.pack.blocks[index].nbytes for index in self.stream.pack.order)

    @property
    def dtype(self):
        """As Resident's."""
        block, part = self.stream.pack.matrices["head"][0]
        return NAMES[self.stream.pack.blocks[block].parts[part].dtype]

    @property
    def plan(self):
        """What stays and what streams."""
        return self.stream.plan

    @property
    def memory_nbytes(self):
        """What resident blocks and slots take; not pages of a mapped file, which the system can take back."""
        stats = self.stream.stats
        return 0 if self.stream.mapped else stats.resident_bytes + stats.slots * stats.slot_bytes

    @property
    def streamed_bytes(self):
        """Of the streamed blocks that passes have used so far."""
        return self._streamed_before + self.stream.stats.streamed_bytes

    def drop_slot(self):
        """Gives up a slot, which makes the reader look less far ahead; one stays. Returns its bytes."""
        return self.stream.drop_slots(1)

    def drop_block(self):
        """Makes a resident block stream. Returns its bytes."""
        return self.stream.drop_resident(1)

    def grow(self):
        """Takes all of the memory that the budget gives it, after it had less: its stream is opened anew.

        Where that fails it is opened as it was. No pass may be under way.
        """
        if self._whole is None:
            return
        few = self.stream
        few.close()
        self._streamed_before += few.stats.streamed_bytes
        with translated():
            try:
                self.stream = self._whole(few.pack)
            except Exception:
                self.stream = type(few)(few.pack, few.plan)

    def pieces(self, with_head):
        """As Resident's. Blocks in slots come one by one and without a key: another time they lie elsewhere."""
        with translated():
            for block in self.stream.blocks(None if with_head else self._body):
                key = ("block", block.index) if block.slot is None else None
                if block.index in self._heads:
                    norm = block.tensors.get("norm")
                    norm = norm if norm is None else norm.float()
                    yield key, ((block.index, Head(*self._heads[block.index], block.tensors["weight"], norm)),)
                else:
                    # Vectors are float32 here, and in a folder's files whatever they were stored as.
                    parts = {name: part.float() if name in VECTORS else part for name, part in block.tensors.items()}
                    yield key, ((self._layers[block.index], Layer(**parts)),)

    def embed(self, ids, out):
        with translated():
            self.stream.rows("embedding", ids, out)

    @functools.cached_property
    def last_norm(self):
        """The norm in front of the head, which lies in the head's first block: kept once it was asked for."""
        with translated():
            return self.stream.pack.read_vector(next(iter(self._heads)), "norm").float().to(self.device)

    def norms(self):
        """All RMS norms' vectors, as Resident's, read from the file."""
        return norms_of(self.stream.pack)

    def to(self, device):
        if torch.device(device) != self.device:
            raise ValueError(f"device: expected {self.device}, where these weights stream to, got {device}")
        return self

    def close(self):
        self.stream.close()
        self.stream.pack.close()

    __del__ = close
