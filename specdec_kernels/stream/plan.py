"""What stays in memory and what streams, under a budget in bytes.

The budget counts what the model owns: resident blocks, slots, and what the caller reserves (KV cache, workspace,
logits, draft). Of blocks that a pass reads one after the other, again and again, a cache that keeps the latest ones
keeps none until it has all of them; a fixed set saves exactly its share of the reading. So the resident set is fixed,
and spread evenly over the pass, so that between two waits there is always work to do.

A slot has to hold the largest block that streams. Making the largest ones resident first makes all slots smaller,
which can be worth more than it costs: the plan tries every number of them and keeps what reads the fewest bytes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from . import checks
from .errors import BudgetError
from .limits import available_memory, memory_limit, parse_bytes
from .pack import Pack
from .slots import reads_per_pass

SLOTS = (3, 2, 1)  # what is tried: three absorb jitter, two overlap reading and computing, one makes them take turns
MAX_SLOTS = 64


@dataclass(frozen=True)
class Plan:
    """See :func:`plan`. Sizes are bytes, blocks are indexes into ``pack.blocks``."""

    device: torch.device
    budget: int
    reserved: dict
    resident: tuple
    streamed: tuple
    slots: int
    slot_bytes: int
    bytes_per_pass: int  # what a pass in the pack's order reads
    minimum: int  # the smallest budget that is feasible
    sizes: dict = field(repr=False)  # block -> bytes
    mapped: bool = False  # everything fits: the file is mapped, and other processes can share it
    host: "Plan | None" = None  # for a device with memory of its own: of what streams, what the host keeps

    @property
    def resident_bytes(self):
        return sum(self.sizes[index] for index in self.resident)

    @property
    def slots_bytes(self):
        return self.slots * self.slot_bytes

    @property
    def total_bytes(self):
        """Everything that the budget counts."""
        return self.resident_bytes + self.slots_bytes + sum(self.reserved.values())

    def predict(self, read_bandwidth, compute_seconds, between=0.0):
        """Seconds that a pass takes.

        read_bandwidth : bytes per second of the reader
        compute_seconds : what a pass takes when nothing has to be read
        between : seconds from one pass to the next (drafting, sampling), in which the slots are filled already
        """
        if isinstance(read_bandwidth, bool) or not isinstance(read_bandwidth, (int, float)):
            raise TypeError(f"read_bandwidth: expected bytes per second, got {type(read_bandwidth).__name__}")
        if not read_bandwidth > 0:
            raise ValueError(f"read_bandwidth: expected bytes per second > 0, got {read_bandwidth}")
        checks.seconds("compute_seconds", compute_seconds)
        checks.seconds("between", between)
        ahead = min(self.slots_bytes, self.bytes_per_pass, read_bandwidth * between)
        reading = (self.bytes_per_pass - ahead) / read_bandwidth
        return reading + compute_seconds if self.slots == 1 else max(reading, compute_seconds)

    def __str__(self):
        blocks = len(self.resident) + len(self.streamed)
        rows = [("resident blocks", f"{len(self.resident)} of {blocks}", self.resident_bytes)]
        if self.mapped:
            rows[0] = ("file, mapped", f"{blocks} blocks", self.resident_bytes)
        if self.slots:
            rows.append(("slots", f"{self.slots} x {readable(self.slot_bytes)}", self.slots_bytes))
        rows += [(name, "", size) for name, size in self.reserved.items()]
        rows += [
            ("total", "", self.total_bytes),
            ("budget", f"on {self.device}", self.budget),
            ("smallest budget", "", self.minimum),
            ("read per pass", "", self.bytes_per_pass),
        ]
        return table(rows) + (f"\nof what streams, on the host:\n{self.host}" if self.host else "")


def readable(size):
    """Bytes as a person reads them: 3.7 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def table(rows):
    left = max(len(name) for name, _, _ in rows)
    middle = max(len(what) for _, what, _ in rows)
    return "\n".join(f"{name:{left}}  {what:>{middle}}  {readable(size):>9}" for name, what, size in rows)


def plan(pack, *, budget=None, device="cpu", reserved=None, slots=None, host_budget=None):
    """Decides what of ``pack`` stays in memory and what streams.

    pack : a Pack, or the path of one
    budget : bytes on ``device`` for weights and what is reserved: an int, or text like "120MB" (10^6) or "120MiB"
        (2^20); None = what is available there now
    reserved : {name: bytes} that the caller will need besides: KV cache, workspace, logits, a draft. They come first.
    slots : how many blocks are in memory besides the resident ones, 1 or more; None = 3, or fewer where that does not
        fit. With one slot, reading and computing take turns.
    host_budget : for a device with memory of its own, bytes of the host's from which blocks stream to it, as ``budget``

    Raises BudgetError if a budget can't be kept; it names the smallest one that can, and what needs it.
    """
    device = checks.device("device", device)
    if host_budget is not None:
        parse_bytes(host_budget, "host_budget")
    if hasattr(pack, "blocks"):
        return _plan_pack(pack, budget, device, reserved, slots, host_budget)
    with Pack.open(checks.source("pack", pack)) as opened:
        return _plan_pack(opened, budget, device, reserved, slots, host_budget)


def _plan_pack(pack, budget, device, reserved, slots, host_budget):
    reserved = _reserved(reserved)
    if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= MAX_SLOTS):
        raise BudgetError(f"slots: expected None or an int from 1 to {MAX_SLOTS}, got {slots!r}")
    order = tuple(pack.order)
    sizes = {index: pack.blocks[index].nbytes for index in order}
    planned = _plan("budget", _budget("budget", budget, device), device, order, sizes, reserved, slots)
    if device.type == "cpu":
        whole = not planned.streamed and all(len(pack.blocks[index].ranges) == 1 for index in sizes)
        return replace(planned, mapped=whole)
    if not planned.streamed:
        return planned
    host, streamed = torch.device("cpu"), set(planned.streamed)
    order = tuple(index for index in order if index in streamed)
    sizes = {index: size for index, size in sizes.items() if index in streamed}
    budget = _budget("host_budget", host_budget, host)
    return replace(planned, host=_plan("host_budget", budget, host, order, sizes, {}, slots))


def _plan(name, budget, device, order, sizes, reserved, slots):
    total, needed = sum(sizes.values()), sum(reserved.values())
    counts = SLOTS if slots is None else (slots,)
    minimum = needed + min(_least(sizes, counts[-1]), total)
    if budget < minimum:
        raise BudgetError(_refusal(name, budget, minimum, device, sizes, reserved, counts[-1]))
    resident, count, slot_bytes, reads = tuple(sizes), 0, 0, 0
    if total > budget - needed:
        fitting = (best for slots in counts if (best := _best(order, sizes, budget - needed, slots)))
        resident, count, slot_bytes, reads = next(fitting)
    return Plan(
        device=device,
        budget=budget,
        reserved=reserved,
        resident=resident,
        streamed=tuple(index for index in sizes if index not in resident),
        slots=count,
        slot_bytes=slot_bytes,
        bytes_per_pass=reads,
        minimum=minimum,
        sizes=sizes,
    )


def _budget(name, value, device):
    cuda = device.type != "cpu" and torch.cuda.is_available()
    if value is None:
        if device.type == "cpu":
            return available_memory()[0]
        if not cuda:
            raise BudgetError(f"{name}: expected a number of bytes, as {device} can't be asked here, got None")
        return torch.cuda.mem_get_info(device)[0]
    value, limit = parse_bytes(value, name), None
    if device.type == "cpu":
        limit, why = memory_limit()
    elif cuda:
        limit, why = torch.cuda.mem_get_info(device)[1], f"memory of {device}"
    if limit is not None and value > limit:
        raise BudgetError(f"{name}: expected at most {limit} bytes ({why}), got {value}")
    return value


def _reserved(reserved):
    if reserved is None:
        return {}
    if not isinstance(reserved, Mapping):
        raise TypeError(f"reserved: expected a dict of names and bytes, got {type(reserved).__name__}")
    for name, size in reserved.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise BudgetError(f"reserved[{name!r}]: expected a number of bytes >= 0, got {size!r}")
    return dict(reserved)


def _by_size(sizes):
    return sorted(sizes, key=sizes.get, reverse=True)


def _least(sizes, slots):
    """The fewest bytes of weights and slots with which a pass is possible."""
    large, least = 0, None
    for index in _by_size(sizes):
        least = min(large + slots * sizes[index], large + slots * sizes[index] if least is None else least)
        large += sizes[index]
    return least or 0


def _best(order, sizes, room, slots):
    """(resident blocks, slots, bytes of a slot, bytes read per pass) that reads least with so many slots, or None."""
    best, large, seen = None, [], set()
    for index in _by_size(sizes):
        size = sizes[index]
        left = room - sum(sizes[i] for i in large) - slots * size
        if left >= 0 and size not in seen:  # of blocks of one size, which one streams makes no difference
            resident = _spread(order, sizes, large, left)
            reads = sum(sizes[i] for i in reads_per_pass(order, resident, slots))
            if best is None or reads < best[-1]:
                slot_bytes = max(sizes[i] for i in sizes if i not in resident)
                best = tuple(i for i in sizes if i in resident), slots, slot_bytes, reads
        seen.add(size)
        large.append(index)
    return best


def _spread(order, sizes, chosen, room):
    """The set of ``chosen`` and of blocks worth up to ``room`` bytes, spread evenly over the pass."""
    resident, uses = set(chosen), Counter(order)
    for often in sorted(set(uses.values()), reverse=True):  # what a pass reads several times is worth more
        some = [index for index in sizes if index not in resident and uses[index] == often]
        share, credit = min(1.0, room / max(1, sum(sizes[i] for i in some))), 0.0
        for index in some:
            credit += share * sizes[index]
            if credit > sizes[index] / 2 and sizes[index] <= room:
                resident.add(index)
                credit -= sizes[index]
                room -= sizes[index]
        for index in some:  # what rounding left over
            if index not in resident and sizes[index] <= room:
                resident.add(index)
                room -= sizes[index]
    return resident


def _refusal(name, budget, minimum, device, sizes, reserved, slots):
    rows = [(what, "", size) for what, size in reserved.items()]
    least = f"{slots} slot{'s' * (slots > 1)} and what is larger"
    rows += [
        ("weights, at least", least, minimum - sum(reserved.values())),
        ("smallest budget", "", minimum),
        ("budget", f"on {device}", budget),
        ("weights, all", f"{len(sizes)} blocks", sum(sizes.values())),
        ("largest block", "", max(sizes.values(), default=0)),
    ]
    return f"{name}: expected at least {minimum} bytes, got {budget}\n{table(rows)}"
