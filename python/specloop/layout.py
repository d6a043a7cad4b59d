"""Whether a pack consists of what the model in its description needs: names, order, kinds and shapes of its weights.

The file's numbers were checked against each other when it was opened, but not against the model: a pass over matrices
of other shapes, or over fewer layers, may well run to its end, and what comes out is no text of this model.
"""

import torch

from .errors import FormatError, show


def check_layout(pack, config, dtype):
    """Raises FormatError unless ``pack`` has the blocks that ``convert`` writes for ``config`` and ``dtype``."""
    heads = [name for name in (pack.blocks[index].name for index in pack.order) if name.startswith("head.")]
    expected = [f"layer.{i}" for i in range(min(config.layers, len(pack.blocks) + 1))]
    found = [pack.blocks[index].name for index in pack.order]
    if not heads or found != expected + [f"head.{i}" for i in range(len(heads))]:
        raise _wrong(pack, f"order of the blocks: expected {config.layers} layers and the head", found)
    layer, vector = layer_shapes(config), {"norm": (config.hidden,)}
    for index in pack.order:
        block = pack.blocks[index]
        if block.name.startswith("layer."):
            _check_parts(pack, block, layer, dtype)
        else:
            rows = block.parts["weight"].shape[:1] if "weight" in block.parts else ()
            parts = {"weight": (*rows, config.hidden)} | (vector if block.name == "head.0" else {})
            _check_parts(pack, block, parts, dtype)
    _check_matrix(pack, "head", config, dtype, [(block.index, "weight") for block in _named(pack, heads)])
    _check_matrix(pack, "embedding", config, dtype)


def layer_shapes(c):
    """Of a layer's parts by name (models/weights.py, Layer)."""
    attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {
        "attention_norm": (c.hidden,),
        "qkv": (attention + 2 * kv, c.hidden),
        "attention_out": (c.hidden, attention),
        "mlp_norm": (c.hidden,),
        "gate_up": (2 * c.intermediate, c.hidden),
        "down": (c.hidden, c.intermediate),
    }
    shapes |= {"qkv_bias": (attention + 2 * kv,)} if c.qkv_bias else {}
    return shapes | ({"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)} if c.qk_norm else {})


def _named(pack, names):
    return [block for name in names for block in pack.blocks if block.name == name]


def _check_parts(pack, block, shapes, dtype):
    if block.parts.keys() != shapes.keys():
        raise _wrong(pack, f"block {show(block.name)}: expected the parts {', '.join(shapes)}", list(block.parts))
    for name, shape in shapes.items():
        _check_part(pack, block, name, shape, dtype)


def _check_part(pack, block, name, shape, dtype):
    part = block.parts[name]
    values = {"int8": torch.int8, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    wanted = (shape, torch.float32 if len(shape) == 1 else values, len(shape) == 2 and dtype == "int8")
    if (part.shape, part.dtype, part.kind == "int8") != wanted:
        what = f"block {show(block.name)}, part {show(name)}: expected {list(shape)} of {wanted[1]}"
        raise _wrong(pack, what, f"{list(part.shape)} of {part.dtype}")


def _check_matrix(pack, name, config, dtype, wanted=None):
    """All rows, each once; ``wanted``: the very parts."""
    parts = pack.matrices.get(name, ())
    if not parts or (wanted is not None and list(parts) != wanted):
        raise _wrong(pack, f"matrix {show(name)}: expected the parts of the {name}", list(parts))
    for index, part in parts:
        block = pack.blocks[index]
        _check_part(pack, block, part, (*block.parts[part].shape[:1], config.hidden), dtype)
    rows = sum(pack.blocks[index].parts[part].shape[0] for index, part in parts)
    expected = config.columns if name == "head" else config.vocab
    if rows != expected:
        raise _wrong(pack, f"matrix {show(name)}: expected {expected} rows", rows)


def _wrong(pack, expected, got):
    return FormatError(f"{pack.path}: {expected}, got {show(got)}")
