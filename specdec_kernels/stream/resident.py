"""Blocks that stay: mapped where all of them do, else read into memory of their own when the stream is opened."""

import logging
from collections import deque

from .errors import StreamError
from .mapping import map_pack

log = logging.getLogger("specdec_kernels.stream")


def mapped_blocks(pack, plan, verify, progress):
    """``(mapping, {index: tensors})`` of the plan's resident blocks; ``(None, {})`` where the file can't be mapped."""
    try:
        mapping = map_pack(pack)
    except StreamError as error:
        log.info("%s is read into memory instead of mapped: %s", pack.path, error)
        return None, {}
    done = 0
    for index in plan.resident:
        if verify:
            pack.check_block(index, mapping.memory(index))
        done += plan.sizes[index]
        progress(done / plan.resident_bytes)
    mapping.check()
    return mapping, {index: mapping[index] for index in plan.resident}


def loaded_blocks(pack, plan, loads, progress):
    """``{index: tensors}`` of the plan's resident blocks. ``loads`` (loads.py, uploads.py) reads several at a time."""
    blocks, done = {}, 0
    if not plan.resident:
        progress(1.0)
    coming, under_way = deque(plan.resident), deque()
    while coming or under_way:
        if coming and len(under_way) <= loads.ahead:
            index = coming.popleft()
            memory = loads.empty(plan.sizes[index])
            under_way.append((index, memory, loads.start(index, memory)))
            continue
        index, memory, load = under_way.popleft()
        load.wait()
        blocks[index] = pack.blocks[index].views(memory)
        done += plan.sizes[index]
        progress(done / plan.resident_bytes)
    return blocks
