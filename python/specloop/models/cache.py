"""The key-value cache of one request."""

import torch

PAGE = 64  # tokens per page
DTYPES = {"int8": torch.int8, "f16": torch.float16, "f32": torch.float32}


class KVCache:
    """Keys and values of one request in pages of ``PAGE`` tokens. Rolling back only moves ``length``.

    ``layers``: per layer (k_cache, k_scale, v_cache, v_scale), the form of ``rope_write_kv_int8`` and ``attend_int8``:
    codes with a float32 scale per token and head for ``kv`` "int8", values and no scales for "f16" and "f32".
    """

    def __init__(self, config, capacity, kv="int8"):
        pages = -(-max(capacity, 1) // PAGE)
        heads = (pages, PAGE, config.kv_heads)
        # empty, not zeros: pages that are never reached never become resident memory
        values = lambda: torch.empty(*heads, config.head_dim, dtype=DTYPES[kv])
        scales = lambda: torch.empty(heads) if kv == "int8" else None
        self.layers = [(values(), scales(), values(), scales()) for _ in range(config.layers)]
        self.capacity = capacity
        self.length = 0
        self.recordings = {}  # passes over exactly these buffers (Llama._pass)
        self.page_table = torch.arange(pages, dtype=torch.int32)[None]
        self.lengths = torch.zeros(1, dtype=torch.int32)

    def truncate(self, length):
        if not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length}, got {length}")
        self.length = length

    @property
    def nbytes(self):
        return sum(t.nbytes for layer in self.layers for t in layer if t is not None)
