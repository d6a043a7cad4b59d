"""The numbers that describe a llama-family decoder, read from GGUF metadata and checked against each other."""

from dataclasses import dataclass

from ..errors import ModelError


@dataclass(frozen=True)
class LlamaConfig:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float

    def __post_init__(self):
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ModelError(f"model: expected {name} of at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"model: expected heads to be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"model: expected an even head dimension, got {self.head_dim}")

    @classmethod
    def from_gguf(cls, metadata, vocab):
        """Reads the ``llama.*`` keys. Raises ModelError for another architecture or a missing or mistyped key."""
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelError(f"general.architecture: expected llama, got {architecture!r}")

        def number(key, kind, default=None):
            value = metadata.get(f"llama.{key}", default)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ModelError(f"llama.{key}: expected a number, got {value!r}")
            if kind is int and not isinstance(value, int):
                raise ModelError(f"llama.{key}: expected an integer, got {value!r}")
            return kind(value)

        scaling = metadata.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", ""):
            raise ModelError(f"llama.rope.scaling.type: expected none, got {scaling!r} (not supported yet)")
        hidden, heads = number("embedding_length", int), number("attention.head_count", int)
        if heads < 1 or hidden % heads:
            raise ModelError(f"llama.attention.head_count: expected a divisor of {hidden}, got {heads}")
        head_dim = number("attention.key_length", int, hidden // heads)
        if number("rope.dimension_count", int, head_dim) != head_dim:
            raise ModelError(
                f"llama.rope.dimension_count: expected {head_dim} like the head dimension (no partial rotary)"
            )
        return cls(
            layers=number("block_count", int),
            hidden=hidden,
            intermediate=number("feed_forward_length", int),
            heads=heads,
            kv_heads=number("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            vocab=vocab,
            context=number("context_length", int),
            rope_theta=number("rope.freq_base", float, 10000.0),
            rms_eps=number("attention.layer_norm_rms_epsilon", float),
        )
