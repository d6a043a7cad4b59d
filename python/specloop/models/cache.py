"""The key-value cache of one request."""

import torch

PAGE = 64  # tokens per page
DTYPES = {"int8": torch.int8, "f16": torch.float16, "f32": torch.float32}


def page_nbytes(config, kv):
    """Bytes of a page: ``PAGE`` keys and values of all layers."""
    scale = 4 if kv == "int8" else 0
    return config.layers * 2 * config.kv_heads * PAGE * (config.head_dim * DTYPES[kv].itemsize + scale)


class Pages:
    """Room for ``tokens`` keys and values per layer, in pages of ``PAGE`` tokens.

    ``layers``: per layer (k_cache, k_scale, v_cache, v_scale), the form of ``rope_write_kv_int8`` and ``attend_int8``:
    codes with a float32 scale per token and head for ``kv`` "int8", values and no scales for "f16" and "f32".
    ``passes``: what was captured on exactly these buffers (Llama._pass). ``reached``: most pages that a cache had room
    for so far; the others were never written, so they take no memory.
    """

    def __init__(self, config, tokens, kv="int8", device="cpu"):
        pages = -(-max(tokens, 1) // PAGE)
        # A head's tokens of a page lie together, which a kernel reads one head at a time: from memory a third faster
        # than tokens with all their heads. Empty, not zeros: pages that are never reached never become resident.
        heads = (pages, config.kv_heads, PAGE)
        by_token = lambda t: t.transpose(1, 2)  # [pages, PAGE, kv_heads, ...]
        values = lambda: by_token(torch.empty(*heads, config.head_dim, dtype=DTYPES[kv], device=device))
        scales = lambda: by_token(torch.empty(heads, device=device)) if kv == "int8" else None
        self.layers = [(values(), scales(), values(), scales()) for _ in range(config.layers)]
        self.table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self.passes = {}
        self.reached = 0
        self.page_nbytes = page_nbytes(config, kv)

    @property
    def nbytes(self):
        """Of the pages that were in use."""
        return self.reached * self.page_nbytes


class KVCache:
    """Keys and values of one request. Rolling back only moves ``length``; ``give_back`` gets the pages in the end."""

    def __init__(self, pages, capacity, give_back):
        self.pages, self.capacity, self.length = pages, capacity, 0
        self._give_back = give_back
        pages.reached = max(pages.reached, -(-capacity // PAGE))

    def __del__(self):
        self._give_back(self.pages)

    def truncate(self, length):
        if not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length}, got {length}")
        self.length = length

    @property
    def nbytes(self):
        """Of the pages that a full cache fills, or filled before this one."""
        return self.pages.nbytes
