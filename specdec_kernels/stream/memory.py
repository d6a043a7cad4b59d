"""Memory that files are read into directly: whole pages, large ones where they help."""

import torch

from ..large_pages import map_large
from ..validate import integer

PAGE = 4096  # what reads past the page cache are aligned to, in the file and in memory


def aligned_empty(nbytes):
    """An uninitialised uint8 CPU tensor [nbytes] in a mapping of its own, which goes when its last view goes.

    It starts on a page (from 2 MB up on a large one, and is made of those where the system has them), so files can be
    read into it past the page cache. A page takes memory when it is first written. MemoryError if there is no room.
    """
    if integer("nbytes", nbytes) < 0:
        raise ValueError(f"nbytes: expected a number of bytes >= 0, got {nbytes}")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory, start = map_large(nbytes)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "more than there are addresses"
        raise MemoryError(f"nbytes: {nbytes} bytes of memory can't be had: {reason}") from None
    with torch.inference_mode(False):  # whatever mode the caller is in, another thread may write to it
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
