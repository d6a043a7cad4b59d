"""What the loader needs of a model's files, whatever their format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.config import LlamaConfig


class Checkpoint(Protocol):
    """An open model. Tensors have Hugging Face's names, "model.layers.0.self_attn.q_proj.weight", and row order: the
    rotary pairs of q and k are i and i + D / 2.

    The methods raise ModelError for a tensor that is not there and FormatError for a file that was cut meanwhile. They
    may be called from several threads.
    """

    path: str
    config: LlamaConfig
    chat_template: str | None

    def names(self) -> Iterable[str]:
        """Of all tensors of the model."""

    def label(self, name: str) -> str:
        """The tensor's name in the file itself, for messages."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def nbytes(self, name: str) -> int:
        """Bytes in the file, for progress."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of a matrix in float32."""

    def read(self, name: str) -> Tensor:
        """A whole vector in float32."""

    def tokenizer(self):
        """A :class:`specloop.text.tokenizer.Tokenizer`, or what has its methods."""

    def text_data(self) -> dict:
        """What :func:`specloop.text.stored.tokenizer_from` makes the same tokenizer of; plain JSON."""

    def identity(self) -> str:
        """Changes when the weights or the vocabulary do: a hash of sizes, times and headers, not of all bytes."""

    def close(self) -> None: ...
