"""The memory behind the caches of a model's requests: pages of 64 tokens, handed out and taken back.

A page holds the keys and values of its tokens for every layer in one stretch of memory. A request gets the pages for
all the tokens that it may come to when its cache is made, the lowest free ones, and they need not be neighbours: a page
table per request says where its tokens are (Kwon et al. 2023, arXiv 2309.06180). No page is shared by requests: equal
prompts are computed anew, so nothing about one request can be seen from another.

On a CPU the pool is address space for as many pages as memory could ever hold. Only what is written takes memory, and
free pages can be given back one by one. Where the system does not offer that, and on a GPU, it has the pages that were
asked for so far, and grows by moving to a larger tensor.
"""

import contextlib
import heapq
import mmap
import sys
import threading
from collections import deque
from pathlib import Path

import torch

from specdec_kernels.stream.errors import BudgetError
from specdec_kernels.stream.limits import available_memory, memory_limit

PAGE = 64  # tokens per page
DTYPES = {"int8": torch.int8, "f16": torch.float16, "f32": torch.float32}
UNIT = 4096  # bytes of memory that a system gives and takes at a time: pages begin where such a piece begins
NORESERVE = 0x4000  # MAP_NORESERVE of Linux, in Python's module since 3.11
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")  # "2": address space counts as memory


def page_nbytes(config, kv):
    """Bytes of a page: ``PAGE`` keys and values of all layers, rounded up to whole units."""
    scale = 4 if kv == "int8" else 0
    size = config.layers * 2 * config.kv_heads * PAGE * (config.head_dim * DTYPES[kv].itemsize + scale)
    return -(-size // UNIT) * UNIT


class Pool:
    """Pages for one model's requests.

    ``layers``: per layer (k_cache, k_scale, v_cache, v_scale), the form of ``rope_write_kv_int8`` and ``attend_int8``:
    codes with a float32 scale per token and head for ``kv`` "int8", values and no scales for "f16" and "f32".
    ``moves``: how often the pool has moved, and these with it. ``keep``: free pages that stay warm for the next
    request, at most. ``most``: pages in all, where memory is not the limit.

    ``take`` is for the thread that holds the model, ``give`` for any, at any time.
    """

    def __init__(self, config, kv, device, *, keep, most=None):
        self.page_nbytes = page_nbytes(config, kv)
        self._config, self._kv, self._device = config, kv, torch.device(device)
        self._keep, self._lock = keep, threading.Lock()
        self._returned = deque()  # by caches that are gone, wherever the garbage collector met them
        self._warm, self._cold = [], []  # heaps of free pages: with memory, and without
        self._fresh = 0  # the first page that nobody had so far
        self._used = 0  # pages in use
        self._unreached = 0  # of these, pages that no text has come to, so that they may not be in memory yet
        self.moves = -1
        self._mapping, memory = None, torch.empty(0, dtype=torch.uint8, device=device)
        if self._device.type == "cpu" and sys.platform == "linux":
            size = most * self.page_nbytes if most else max(memory_limit().nbytes, keep * self.page_nbytes)
            self._mapping, memory = _reserved(size) or (None, memory)
        self._lay_out(memory)

    def _lay_out(self, memory):
        """Views of the bytes: codes [pages, layers, 2, kv_heads, PAGE, head_dim], then scales without the last."""
        self.moves += 1
        c, dtype = self._config, DTYPES[self._kv]
        self._pages = memory.numel() // self.page_nbytes
        pages = self._bytes = memory[: self._pages * self.page_nbytes].view(self._pages, self.page_nbytes)
        # A head's tokens of a page lie together, which a kernel reads one head at a time: from memory a third faster
        # than tokens with all their heads.
        form = (c.layers, 2, c.kv_heads, PAGE)
        size = torch.Size(form).numel()
        split = size * c.head_dim * dtype.itemsize
        values = pages[:, :split].view(dtype).unflatten(1, (*form, c.head_dim))
        scales = None
        if self._kv == "int8":
            scales = pages[:, split : split + 4 * size].view(torch.float32).unflatten(1, form)
        by_token = lambda t, layer, which: None if t is None else t[:, layer, which].transpose(1, 2)
        self.layers = [
            tuple(by_token(part, layer, which) for which in (0, 1) for part in (values, scales))
            for layer in range(c.layers)
        ]

    def take(self, count):
        """The numbers of ``count`` pages. Raises MemoryError if there is no room for so many."""
        with self._lock:
            self._collect()
            free = len(self._warm) + len(self._cold)
            if free + self._pages - self._fresh < count:
                self._grow(self._fresh + count - free)
            pages = []
            while len(pages) < count:
                heap = self._warm or self._cold
                if heap:
                    pages.append(heapq.heappop(heap))
                else:
                    pages.append(self._fresh)
                    self._fresh += 1
            self._used += count
            self._unreached += count
            return pages

    def reach(self, pages):
        """So many more of the pages in use are in memory for sure."""
        with self._lock:
            self._unreached -= pages

    def give(self, pages, unreached):
        """Takes pages back, so many of which no text came to. Safe in ``__del__``: it waits for nobody."""
        self._returned.append((pages, unreached))

    def copy(self, source, targets):
        """Copies a page, all layers, to others. Whole: one stretch each is faster than a page's tokens head by head."""
        for target in targets:
            self._bytes[target].copy_(self._bytes[source])

    @property
    def room(self):
        """How many more pages memory has room for, if an eighth of it is left to others. Pages that are in use, but
        that no text has come to, will be in memory, too."""
        with self._lock:
            self._collect()
            free = self._free_memory() * 7 // 8 // self.page_nbytes
            if self._mapping is None:  # it grows by moving: for a while it is there twice
                return max(0, free - self._pages) + len(self._warm)
            return max(0, min(free + len(self._warm) - self._unreached, self._pages - self._used))

    def _free_memory(self):
        if self._device.type == "cuda":
            kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return torch.cuda.mem_get_info(self._device)[0] + kept
        try:
            return available_memory().nbytes
        except BudgetError:  # nothing is known, so what fails will tell
            return sys.maxsize

    @property
    def used(self):
        """Pages in use."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def spare(self):
        """Free pages with memory, which the next request takes first."""
        with self._lock:
            self._collect()
            return len(self._warm)

    def drop_spare(self):
        """Gives the memory of free pages back to the system, or to the device. Returns its bytes."""
        with self._lock:
            self._collect()
            freed = len(self._warm) * self.page_nbytes
            if self._mapping is not None:
                self._cool(0)
            elif freed and not self._used:
                self._fresh, self._warm = 0, []
                self._lay_out(self._bytes.new_empty(0))
            else:
                freed = 0
            return freed

    def _collect(self):
        while self._returned:
            pages, unreached = self._returned.popleft()
            self._used -= len(pages)
            self._unreached -= unreached
            for page in pages:
                heapq.heappush(self._warm, page)
        if self._mapping is not None and len(self._warm) > self._keep:
            self._cool(self._keep)

    def _cool(self, left):
        """Gives back the memory of all warm pages but the ``left`` lowest."""
        pages = sorted(self._warm)
        self._warm, cooled = pages[:left], pages[left:]
        for page in cooled:
            start, stop = page * self.page_nbytes, (page + 1) * self.page_nbytes
            start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
            heapq.heappush(self._cold, page)

    def _grow(self, pages):
        if self._mapping is not None:
            raise MemoryError(f"a pool of {self._pages} cache pages has no {pages - self._pages} more")
        before = self._bytes
        try:
            memory = torch.empty(pages * self.page_nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise MemoryError(f"cache pages: {error}") from None
        self._lay_out(memory)
        self._bytes[: len(before)] = before


def _reserved(nbytes):
    """(mapping, its bytes as a tensor) of so much address space, or None where that is counted as if it were memory."""
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    unlimited = all(limit == resource.RLIM_INFINITY for limit in limits)
    with contextlib.suppress(OSError):
        if unlimited and OVERCOMMIT.read_text().strip() != "2":
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
            with torch.inference_mode(False):  # whatever mode the caller is in
                return mapping, torch.frombuffer(mapping, dtype=torch.uint8)
    return None
