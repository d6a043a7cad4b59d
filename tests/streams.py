"""What the tests of streaming share: packs with blocks of different sizes, and what a pass over them should see."""

import os
import random
import time
from dataclasses import replace

import torch

from readers import Disk
from specdec_kernels import Int8Weight, pack_int8
from specdec_kernels.stream import Pack, PackWriter, WeightStream
from specdec_kernels.stream.plan import Plan
from specdec_kernels.stream.slots import reads_per_pass

PAGE = 4096


def write_pack(path, count, seed=0, pages=(1, 3)):
    """A pack of ``count`` blocks, each with a matrix of bytes, an int8 matrix and a vector, every one different."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    with PackWriter(path, {"seed": seed}, header_room=PAGE) as writer:
        for i in range(count):
            size = rng.randint(*pages) * PAGE - rng.randrange(64)
            writer.add_block(
                f"layer.{i}",
                {
                    "bytes": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator),
                    "matrix": pack_int8(torch.randn(24, 32, generator=generator), group_size=16),
                    "vector": torch.randn(7, generator=generator),
                },
            )
        writer.matrix("head", [(f"layer.{i}", "matrix") for i in range(count)])
        writer.matrix("embedding", [(f"layer.{i}", "matrix") for i in range(count)])
    return path


def plan_of(pack, slots, resident=()):
    """A plan with so many slots, whatever a planner would say to it."""
    order = tuple(pack.order)
    sizes = {index: pack.blocks[index].nbytes for index in order}
    streamed = tuple(index for index in order if index not in resident)
    return Plan(
        device=torch.device("cpu"),
        budget=0,
        reserved={},
        resident=tuple(resident),
        streamed=streamed,
        slots=slots if streamed else 0,
        slot_bytes=max((sizes[index] for index in streamed), default=0),
        bytes_per_pass=sum(sizes[index] for index in reads_per_pass(order, resident, slots)),
        minimum=0,
        sizes=sizes,
    )


def device_plan(pack, slots, resident=(), host_resident=None, host_slots=1):
    """``slots`` on the device; the host keeps ``host_resident``, or everything that streams."""
    on_device = plan_of(pack, slots, resident)
    streamed = on_device.streamed
    kept = streamed if host_resident is None else tuple(i for i in host_resident if i in streamed)
    read = tuple(i for i in streamed if i not in kept)
    host = replace(
        on_device,
        resident=kept,
        streamed=read,
        slots=host_slots if read else 0,
        slot_bytes=max((on_device.sizes[i] for i in read), default=0),
        sizes={i: on_device.sizes[i] for i in streamed},
    )
    return replace(on_device, device=torch.device("cuda"), host=host)


def parts(tensors):
    """The bits of a block's parts, copied."""
    flat = {}
    for name, value in tensors.items():
        pieces = (value.codes, value.scale) if isinstance(value, Int8Weight) else (value,)
        flat[name] = [piece.clone().view(torch.uint8) for piece in pieces]
    return flat


def contents(pack):
    """What each block of the pack holds, read apart from any stream."""
    result = []
    for block in pack.blocks:
        result.append(parts(pack.read_block(block.index, page_aligned(block.nbytes))))
    return result


def same(found, expected):
    return found.keys() == expected.keys() and all(
        len(found[name]) == len(expected[name])
        and all(torch.equal(a, b) for a, b in zip(found[name], expected[name], strict=True))
        for name in expected
    )


def run_pass(stream, expected, order=None):
    """One pass in which every block is compared while it is valid. Returns the indexes as they came."""
    seen = []
    for block in stream.blocks(order):
        stream.check(block)
        assert same(parts(block.tensors), expected[block.index]), f"block {block.index} in slot {block.slot}"
        seen.append(block.index)
    return seen


def threads_of(pid="self"):
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors_of(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Packs:
    """``packs(n)``: an open pack of n blocks and its contents, made when it is first asked for."""

    def __init__(self, folder):
        self.folder, self.made = folder, {}

    def __call__(self, count):
        if count not in self.made:
            pack = Pack.open(write_pack(self.folder / f"{count}.safetensors", count, seed=count))
            self.made[count] = pack, contents(pack)
        return self.made[count]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pack, _ in self.made.values():
            pack.close()


def settle(stream):
    """Waits until all that was begun is read."""
    last = -1
    while last != (last := stream.stats.bytes_read):
        time.sleep(0.03)


def settled(count, expected):
    """Whether ``count()`` comes down to ``expected``: the system forgets a thread a little after it was joined."""
    deadline = time.monotonic() + 2
    while count() > expected and time.monotonic() < deadline:
        time.sleep(0.005)
    return count() <= expected


class Reads(Disk):
    """A disk that can be stopped: while ``gate`` is a closed event, nothing is read."""

    gate = None

    def __call__(self, fd, view, offset):
        if self.gate is not None:
            self.gate.wait(20)
        return super().__call__(fd, view, offset)


def opened(pack, slots, resident=(), **options):
    """A stream with so many slots that poisons them and reads by ``Reads``."""
    options = {"poison": True, "pread": Reads(), **options}
    return WeightStream(pack, plan_of(pack, slots, resident), **options)


def streamed_bytes(pack, order, resident=()):
    return sum(pack.blocks[index].nbytes for index in order if index not in resident)


def page_aligned(size):
    """uint8 [size] on a page."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:size]
