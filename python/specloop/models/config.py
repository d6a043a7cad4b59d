"""The numbers that describe a decoder of the llama family, read from a file's metadata and checked against each other.

What the family shares: RMS norms, rotary attention with grouped heads, a gated SiLU feed-forward half. What its members
differ in are the fields at the end: a bias of q, k and v (Qwen2), norms of every head's q and k (Qwen3), the scaling of
the rotary frequencies (Llama 3.1, long Qwens), a window of attention (Mistral), a head of its own or the embedding. And
``draft_ids``, which no target has: a draft may know fewer ids to say than it reads.
"""

import math
from dataclasses import dataclass, field

from ..drafts.vocabulary import check_ids
from ..errors import ModelError, show
from .rope import checked_scaling

# By name in config.json and in GGUF; Mistral's GGUF files say llama.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
MOST = 2**31 - 1  # of what is counted: kernels take positions and ids as int32
_COUNTS = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "context")


@dataclass(frozen=True)
class LlamaConfig:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  # positions that the model can see: never more than its window
    rope_theta: float
    rms_eps: float
    architecture: str = "llama"
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True  # whether the embedding is the head, too
    rope_scaling: dict | None = field(default=None, hash=False)  # as checked_scaling (rope.py) returns it
    sliding_window: int | None = None  # positions that attention reaches back, itself included
    draft_ids: tuple[int, ...] | None = (
        None  # the ids that the head's rows stand for; None = all (drafts/vocabulary.py)
    )

    def __post_init__(self):
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                raise ModelError(f"model: expected {name} of at least 1 and at most {MOST}, got {show(value)}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"model: expected heads to be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"model: expected an even head dimension, got {self.head_dim}")
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"model: architecture {show(self.architecture)} is not supported "
                f"(supported: {', '.join(ARCHITECTURES)})"
            )
        for name, least, most in (("rope_theta", 1, 1e15), ("rms_eps", 0, 1)):  # real ones: 1e4 to 1e9, 1e-6 to 1e-5
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ModelError(f"model: expected {name} from {least} to {most:g}, got {show(value)}")
        for name in ("qkv_bias", "qk_norm", "tied"):
            if not isinstance(getattr(self, name), bool):
                raise ModelError(f"model: expected {name} to be true or false, got {show(getattr(self, name))}")
        if self.draft_ids is not None:
            ids = check_ids(self.draft_ids, self.vocab)
            object.__setattr__(self, "draft_ids", None if len(ids) == self.vocab else tuple(ids))
            if self.tied and self.draft_ids is not None:
                raise ModelError("model: draft_ids: expected a head of their own rows, got one that is the embedding")
        scaling = checked_scaling(self.rope_scaling)
        object.__setattr__(self, "rope_scaling", scaling)
        if scaling is not None and scaling["rope_type"] == "dynamic":
            self._cut_context(scaling.get("original_max_position_embeddings", self.context))
        if self.sliding_window is not None:
            if type(self.sliding_window) is not int or self.sliding_window < 1:
                raise ModelError(f"model: expected sliding_window of at least 1, got {show(self.sliding_window)}")
            # Up to here no position is out of any other's reach, so that no kernel needs to know of the window.
            self._cut_context(self.sliding_window)

    @property
    def columns(self):
        """How many logits a row has."""
        return self.vocab if self.draft_ids is None else len(self.draft_ids)

    def _cut_context(self, most):
        object.__setattr__(self, "context", min(self.context, int(most)))

    @classmethod
    def from_hf(cls, config):
        """Reads the dict of a ``config.json``. Raises ModelError for what this family or this decoder does not have."""
        if not isinstance(config, dict):
            raise ModelError(f"config.json: expected an object, got {show(config)}")
        read = _HuggingFace(config)
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise ModelError(
                f"config.json: model_type {show(kind)} is not supported (supported: {', '.join(ARCHITECTURES)})"
            )
        read.refuse_what_is_missing_here(kind)
        hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
        if hidden % heads and "head_dim" not in config:
            raise ModelError(f"config.json: num_attention_heads: expected a divisor of {hidden}, got {heads}")
        theta, scaling, stretched = read.rope()
        return cls(
            layers=read.count("num_hidden_layers"),
            hidden=hidden,
            intermediate=read.count("intermediate_size"),
            heads=heads,
            kv_heads=read.count("num_key_value_heads", heads if kind == "llama" else None),
            head_dim=read.count("head_dim", 128 if kind == "qwen3" else hidden // heads),
            vocab=read.count("vocab_size"),
            context=max(read.count("max_position_embeddings"), stretched),
            rope_theta=theta,
            rms_eps=read.number("rms_norm_eps", 1e-6),
            architecture=kind,
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            tied=read.flag("tie_word_embeddings", False),
            rope_scaling=scaling,
            sliding_window=read.window(kind),
            draft_ids=config.get("draft_ids"),
        )

    @classmethod
    def from_gguf(cls, metadata, vocab):
        """Reads the architecture's keys. Raises ModelError for another architecture or a missing or mistyped key.

        Whether the head is tied is known only from the tensors, as are a llama's rotary factors.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in ("llama", "qwen2", "qwen3"):
            raise ModelError(f"general.architecture: expected llama, qwen2 or qwen3, got {architecture!r}")

        def number(key, kind, default=None):
            key = f"{architecture}.{key}"
            value = metadata.get(key, default)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ModelError(f"{key}: expected a number, got {value!r}")
            if kind is int and not isinstance(value, int):
                raise ModelError(f"{key}: expected an integer, got {value!r}")
            return kind(value)

        scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
        context = number("context_length", int)
        if scaling in ("none", ""):
            scaling = None
        elif scaling == "linear":
            scaling = {"rope_type": "linear", "factor": number("rope.scaling.factor", float)}
        elif scaling == "yarn":
            trained = number("rope.scaling.original_context_length", int)
            scaling = {
                "rope_type": "yarn",
                "factor": number("rope.scaling.factor", float),
                "original_max_position_embeddings": trained,
            }
        else:
            raise ModelError(f"{architecture}.rope.scaling.type: expected none, linear or yarn, got {show(scaling)}")
        hidden, heads = number("embedding_length", int), number("attention.head_count", int)
        key_length = metadata.get(f"{architecture}.attention.key_length")
        if heads < 1 or (key_length is None and hidden % heads):
            raise ModelError(f"{architecture}.attention.head_count: expected a divisor of {hidden}, got {heads}")
        head_dim = number("attention.key_length", int, hidden // heads)
        if number("rope.dimension_count", int, head_dim) != head_dim:
            raise ModelError(
                f"{architecture}.rope.dimension_count: expected {head_dim} like the head dimension (no partial rotary)"
            )
        if number("attention.value_length", int, head_dim) != head_dim:
            raise ModelError(f"{architecture}.attention.value_length: expected {head_dim} like the keys'")
        window = number("attention.sliding_window", int, 0)
        return cls(
            layers=number("block_count", int),
            hidden=hidden,
            intermediate=number("feed_forward_length", int),
            heads=heads,
            kv_heads=number("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            vocab=vocab,
            context=context,
            rope_theta=number("rope.freq_base", float, 10000.0),
            rms_eps=number("attention.layer_norm_rms_epsilon", float),
            architecture=architecture,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            rope_scaling=scaling,
            sliding_window=window or None,
        )


class _HuggingFace:
    """The values of a config.json; null counts as absent."""

    def __init__(self, config):
        self._config = {key: value for key, value in config.items() if value is not None}

    def number(self, key, default=None, of=None):
        value = (self._config if of is None else of).get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"config.json: {key}: expected a number, got {show(value)}")
        return float(value)

    def count(self, key, default=None):
        value = self._config.get(key, default)
        if type(value) is not int or not 1 <= value <= MOST:
            wanted = f"an integer of at least 1 and at most {MOST}"
            raise ModelError(f"config.json: {key}: expected {wanted}, got {show(value)}")
        return value

    def flag(self, key, default):
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key}: expected true or false, got {show(value)}")
        return value

    def refuse_what_is_missing_here(self, kind):
        config = self._config
        if "quantization_config" in config:
            raise ModelError("config.json: quantization_config: expected none: only plain bf16, f16 and f32 are read")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"config.json: hidden_act: expected 'silu', got {show(config['hidden_act'])}")
        for key in ("attention_bias", "mlp_bias"):
            if self.flag(key, False):
                raise ModelError(f"config.json: {key}: expected false for {kind}, got true (not supported)")

    def rope(self):
        """(theta, scaling or None, the context that the scaling was made for or 0).

        Older files have rope_theta and rope_scaling, whose type is "type" or "rope_type"; newer ones rope_parameters.
        """
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(self._config.get(key, {}), dict):
                raise ModelError(f"config.json: {key}: expected an object, got {show(self._config[key])}")
        told = dict(self._config.get("rope_scaling", {}) or self._config.get("rope_parameters", {}))
        theta = self.number("rope_theta", self._config.get("rope_theta", 10000.0), told)
        if theta < 1:
            raise ModelError(f"config.json: rope_theta: expected at least 1, got {theta}")
        if told.pop("partial_rotary_factor", self._config.get("partial_rotary_factor", 1.0)) != 1:
            raise ModelError("config.json: partial_rotary_factor: expected 1 (whole heads are rotated)")
        told.pop("rope_theta", None)
        kind = told["rope_type"] = told.get("rope_type") or told.get("type")
        told.pop("type", None)
        if kind in ("llama3", "yarn"):
            trained = self._config.get("original_max_position_embeddings")
            told["original_max_position_embeddings"] = (
                trained or told.get("original_max_position_embeddings") or self.count("max_position_embeddings")
            )
        if kind == "dynamic":  # it starts to stretch where the model's own context ends
            told["original_max_position_embeddings"] = self.count("max_position_embeddings")
        scaling = checked_scaling(told, "config.json: rope_scaling")
        stretched = scaling["factor"] * scaling["original_max_position_embeddings"] if kind == "yarn" else 0
        return theta, scaling, int(stretched)

    def window(self, kind):
        """Positions that attention reaches back, or None: Qwens have the number in the file even if it is not used."""
        if kind == "llama" or (kind != "mistral" and not self.flag("use_sliding_window", False)):
            return None
        return self.count("sliding_window") if "sliding_window" in self._config else None
