"""Rotary frequencies, with the scalings by which models were stretched to longer contexts.

Position p turns pair i of a head by the angle p * frequency[i]; plain frequencies are theta^(-2i / D). A scaling
divides some or all of them, and yarn also lengthens the rotated vectors by an attention factor. All of it in float64:
the tables that are made of it are rounded to float32 once.

    linear   every frequency / factor (Chen et al. 2023, arXiv 2306.15595)
    llama3   waves shorter than original / high_freq_factor as they are, longer than original / low_freq_factor divided
             by factor, those between blended (Llama 3.1's release)
    yarn     blended by pair index instead of by wavelength (Peng et al. 2023, arXiv 2309.00071)
    factors  a divisor for each pair, as GGUF files hold them
    dynamic  plain up to the trained context, where this model's context ends: beyond it, every length has frequencies
             of its own, which would change keys that are already in the cache
"""

import math

import torch

from ..errors import ModelError, show

LEAST, MOST = 1e-9, 1e9  # of a scaling's numbers: with smaller or larger ones angles or tables overflow
_COMMON = {"rope_type"}
# type -> (keys that must be there, keys that may)
_KEYS = {
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "factors": ({"factors"}, set()),
}


def checked_scaling(scaling, name="rope_scaling"):
    """The scaling as :func:`frequencies` takes it: None, or a dict of its type and numbers. Raises ModelError."""
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise ModelError(f"{name}: expected an object, got {show(scaling)}")
    kind = scaling.get("rope_type")
    if kind in (None, "default", "none"):
        return None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ModelError(f"{name}: type {show(kind)} is not supported (supported: default, {', '.join(_KEYS)})")
    required, optional = _KEYS[kind]
    given = {key: value for key, value in scaling.items() if value is not None}
    missing, unknown = required - given.keys(), given.keys() - required - optional - _COMMON
    if missing or unknown:
        what = f"no {', '.join(sorted(missing))}" if missing else f"also {', '.join(sorted(map(str, unknown)))}"
        raise ModelError(f"{name}: expected {', '.join(sorted(required))} for type {kind!r}, got {what}")
    if not isinstance(given.get("factors", []), list):
        raise ModelError(f"{name}.factors: expected a list of numbers, got {show(given['factors'])}")
    for key, value in given.items():
        if key in ("rope_type", "truncate"):
            continue
        for number in value if key == "factors" else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float) or not LEAST <= number <= MOST:
                wanted = f"a positive number from {LEAST:g} to {MOST:g}"
                raise ModelError(f"{name}.{key}: expected {wanted}, got {show(number)}")
    if not isinstance(given.get("truncate", True), bool):
        raise ModelError(f"{name}.truncate: expected true or false, got {show(given['truncate'])}")
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise ModelError(f"{name}: expected low_freq_factor below high_freq_factor, got {show(given)}")
    return given


def frequencies(config):
    """``(float64 [D / 2], attention factor)``: angles per position, and what cosine and sine are multiplied with."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-pairs
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] == "dynamic":
        return plain, 1.0
    if scaling["rope_type"] == "factors":
        factors = torch.tensor(scaling["factors"], dtype=torch.float64)
        if factors.shape != plain.shape:
            raise ModelError(f"rope_scaling.factors: expected {plain.shape[0]} numbers, got {factors.shape[0]}")
        return plain / factors, 1.0
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, scaling, config), _attention_factor(scaling)


def table(config, positions):
    """Cosines, then sines, float32 [positions, D]: what the decoder rotates q and k with."""
    frequency, factor = frequencies(config)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return (torch.cat([angle.cos(), angle.sin()], 1) * factor).float()


def _llama3(plain, scaling):
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # of each pair in the trained context
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling["factor"]


def _yarn(plain, scaling, config):
    trained = scaling["original_max_position_embeddings"]

    def pair_that_turns(times):
        """The index, not rounded, of the pair that turns so often in the trained context."""
        return config.head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(scaling.get("beta_fast", 32)), pair_that_turns(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    index = torch.arange(len(plain), dtype=torch.float64)
    divided = ((index - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    return divided * plain / scaling["factor"] + (1 - divided) * plain


def _attention_factor(scaling):
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def scale(weight):
        return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return scale(scaling["mscale"]) / scale(scaling["mscale_all_dim"])
    return scale(1)
