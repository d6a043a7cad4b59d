"""The planner: what stays, what streams, under a budget that is kept to the byte. Numbers: reports on streaming."""

import re
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels.stream import BudgetError
from specdec_kernels.stream.plan import plan

PAGE = 4096


def shape(*pages, order=None, ranges=1):
    """What a planner sees of a pack: blocks of so many pages."""
    blocks = [SimpleNamespace(nbytes=n * PAGE, ranges=(None,) * ranges) for n in pages]
    return SimpleNamespace(blocks=blocks, order=tuple(range(len(pages)) if order is None else order))


def runs(order, resident):
    """Lengths of the stretches of streamed blocks in the pass, as a circle."""
    marks = "".join("r" if index in resident else "s" for index in order)
    first = marks.find("r")
    return [len(run) for run in (marks[first:] + marks[:first]).split("r") if run] if first >= 0 else [len(marks)]


def test_everything_that_fits_is_mapped():
    made = plan(shape(3, 3, 4), budget=10 * PAGE + 7, reserved={"kv": 7})
    assert made.mapped and made.resident == (0, 1, 2) and made.streamed == () and made.slots == 0
    assert made.total_bytes == made.budget and made.bytes_per_pass == 0
    assert made.predict(1e9, 0.5) == 0.5


def test_blocks_from_several_places_are_not_mapped():
    made = plan(shape(3, 3, ranges=2), budget=6 * PAGE)
    assert not made.mapped and made.resident == (0, 1)


def test_a_budget_of_half():
    made = plan(shape(*[1] * 30), budget=15 * PAGE)
    assert made.slots == 3 and made.slot_bytes == PAGE
    assert len(made.resident) == 12 and len(made.streamed) == 18
    assert made.bytes_per_pass == 18 * PAGE and made.total_bytes == 15 * PAGE


@pytest.mark.parametrize("blocks", [5, 12, 31])
def test_the_resident_set_is_spread_evenly(blocks):
    for pages in range(2, blocks):
        made = plan(shape(*[1] * blocks), budget=pages * PAGE, slots=1)
        assert len(made.resident) == pages - 1
        lengths = runs(range(blocks), made.resident)
        if len(made.resident) < blocks / 2:
            assert max(lengths) - min(lengths) <= 1
        else:
            assert max(lengths) == 1


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(0, 40), st.one_of(st.none(), st.integers(1, 4)), st.integers(0, 3))
def test_a_budget_is_kept_and_the_smallest_one_is_exact(pages, extra, slots, reserved):
    pack, needs = shape(*pages), {"kv": reserved * PAGE + 5}
    with pytest.raises(BudgetError) as refused:
        plan(pack, budget=1, reserved=needs, slots=slots)
    least = int(re.match(r"budget: expected at least (\d+) bytes, got 1", str(refused.value))[1])
    with pytest.raises(BudgetError, match=f"at least {least} "):
        plan(pack, budget=least - 1, reserved=needs, slots=slots)
    made = plan(pack, budget=least + extra * PAGE, reserved=needs, slots=slots)
    assert made.minimum == least
    assert made.total_bytes <= made.budget
    assert made.total_bytes == made.resident_bytes + made.slots * made.slot_bytes + sum(needs.values())
    assert sorted(made.resident + made.streamed) == list(range(len(pages)))
    assert made.slot_bytes == max((pages[i] * PAGE for i in made.streamed), default=0)
    assert bool(made.streamed) == (made.slots > 0) == (made.bytes_per_pass > 0) == (not made.mapped)
    assert made.bytes_per_pass == sum(pages[i] * PAGE for i in made.streamed)  # each block of a pass exactly once
    assert made.slots in ((1, 2, 3) if slots is None else (slots,)) or made.mapped


def test_more_memory_never_reads_more():
    pack = shape(*[2] * 17)
    for slots in (1, 2, 3):
        reads = [plan(pack, budget=n * PAGE, slots=slots).bytes_per_pass for n in range(2 * slots, 35)]
        assert reads == sorted(reads, reverse=True) and reads[-1] == 0


def test_report_40_a_matrix_larger_than_the_slots():
    """It becomes resident if that reads less than slots of its size do; else the message has the number."""
    pack = shape(*[2] * 10, 10)
    made = plan(pack, budget=22 * PAGE, slots=2)
    assert 10 in made.resident and made.slot_bytes == 2 * PAGE and len(made.resident) == 5
    assert made.minimum == 14 * PAGE  # itself and two slots of the others
    with pytest.raises(BudgetError, match=rf"at least {14 * PAGE} bytes, got {13 * PAGE}(.|\n)*largest block +41.0 kB"):
        plan(pack, budget=13 * PAGE, slots=2)


def test_report_68_what_is_reserved_comes_first():
    """A draft's bytes are never traded for more resident blocks of the target."""
    pack = shape(*[2] * 10)
    alone = plan(pack, budget=16 * PAGE)
    beside = plan(pack, budget=16 * PAGE, reserved={"draft": 9 * PAGE, "kv": PAGE})
    assert len(alone.resident) == 5 and alone.slots == 3
    assert beside.resident == () and beside.slots == 3 and beside.total_bytes == 16 * PAGE
    tight = plan(pack, budget=16 * PAGE, reserved={"draft": 13 * PAGE})
    assert tight.slots == 1 and tight.streamed == tuple(range(10))
    with pytest.raises(BudgetError, match=r"(?s)at least 69632 bytes, got 65536.*draft +61.4 kB"):
        plan(pack, budget=16 * PAGE, reserved={"draft": 15 * PAGE})


def test_a_block_that_a_pass_reads_twice_is_resident_first():
    made = plan(shape(1, 1, 1, 1, order=[0, 3, 1, 3, 2]), budget=2 * PAGE, slots=1)
    assert made.resident == (3,)
    assert made.bytes_per_pass == 3 * PAGE


@pytest.mark.parametrize("budget", [0, -1, "0", "-5MB", "12x", "", "MB", True, float("nan"), float("inf"), [1], 2**62])
def test_budgets_that_are_none(budget):
    with pytest.raises((BudgetError, TypeError), match=r"^budget: expected .*got "):
        plan(shape(1, 1), budget=budget)


@pytest.mark.parametrize("reserved", [{"kv": -1}, {"kv": 1.5}, {"kv": True}, {"kv": "1MB"}])
def test_reservations_that_are_none(reserved):
    with pytest.raises(BudgetError, match=r"reserved\['kv'\]: expected a number of bytes"):
        plan(shape(1, 1), budget=PAGE, reserved=reserved)


def test_reservations_are_a_dict():
    with pytest.raises(TypeError, match="reserved: expected a dict of names and bytes, got int"):
        plan(shape(1, 1), budget=PAGE, reserved=5)


def test_a_pack_without_blocks():
    made = plan(shape(), budget=10, reserved={"kv": 7})
    assert made.total_bytes == made.minimum == 7 and made.resident == made.streamed == ()
    with pytest.raises(BudgetError, match="at least 7 bytes, got 6"):
        plan(shape(), budget=6, reserved={"kv": 7})


@pytest.mark.parametrize("slots", [0, -1, 65, 1.0, True, "2"])
def test_slots_that_are_none(slots):
    with pytest.raises(BudgetError, match="slots: expected None or an int from 1 to 64"):
        plan(shape(1, 1), budget=PAGE, slots=slots)


def test_without_a_budget_what_is_available_counts(monkeypatch):
    monkeypatch.setattr(sys.modules[plan.__module__], "available_memory", lambda: (5 * PAGE, "a test"))
    made = plan(shape(*[1] * 9))
    assert made.budget == 5 * PAGE and len(made.resident) == 2 and made.slots == 3


def test_a_budget_above_the_memory_says_why(monkeypatch):
    monkeypatch.setattr(sys.modules[plan.__module__], "memory_limit", lambda: (5 * PAGE, "a group's memory.max"))
    with pytest.raises(BudgetError, match=r"budget: expected at most 20480 bytes \(a group's memory.max\), got 20481"):
        plan(shape(1), budget=5 * PAGE + 1)


def test_the_predicted_time():
    """W / BW without overlap of anything else, compute where that is longer, the sum where there is one slot."""
    pack = shape(*[1000] * 10)
    made = plan(pack, budget=5000 * PAGE, slots=2)
    assert made.bytes_per_pass == 7000 * PAGE
    assert made.predict(7000 * PAGE / 2.0, 0.5) == pytest.approx(2.0)
    assert made.predict(7000 * PAGE / 2.0, 3.0) == pytest.approx(3.0)
    one = plan(pack, budget=5000 * PAGE, slots=1)
    assert one.predict(6000 * PAGE / 2.0, 3.0) == pytest.approx(5.0)
    # Between passes the slots fill: half a second reads a quarter of the pass, but the slots hold two blocks of seven.
    assert made.predict(7000 * PAGE / 2.0, 0.1, between=0.25) == pytest.approx(1.75)
    assert made.predict(7000 * PAGE / 2.0, 0.1, between=5.0) == pytest.approx(2.0 * 5 / 7)
    for bandwidth in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="read_bandwidth: expected bytes per second > 0"):
            made.predict(bandwidth, 1.0)


def test_a_plan_as_a_table():
    text = str(plan(shape(*[1000] * 10), budget=6 * 4096000, reserved={"kv": 4096000}, slots=2))
    assert re.search(r"resident blocks +3 of 10 +12.3 MB", text)
    assert re.search(r"slots +2 x 4.1 MB +8.2 MB", text)
    assert re.search(r"kv +4.1 MB", text) and re.search(r"total +24.6 MB", text)
    assert re.search(r"read per pass +28.7 MB", text)


def test_two_tiers_for_a_device_with_memory_of_its_own():
    """What does not fit the device comes from the host, and what does not fit there from the file, in every pass."""
    pack = shape(*[2] * 10)
    made = plan(pack, budget=10 * PAGE, device="cuda", slots=2, host_budget=1000 * PAGE)
    assert len(made.resident) == 3 and len(made.streamed) == 7 and not made.mapped
    assert made.host.resident == made.streamed and made.host.bytes_per_pass == 0 and not made.host.mapped
    tight = plan(pack, budget=10 * PAGE, device="cuda", slots=2, host_budget=8 * PAGE)
    assert sorted(tight.host.resident + tight.host.streamed) == sorted(tight.streamed)
    assert len(tight.host.resident) == 2 and tight.host.bytes_per_pass == 5 * 2 * PAGE
    with pytest.raises(BudgetError, match=f"host_budget: expected at least {4 * PAGE} bytes, got {3 * PAGE}"):
        plan(pack, budget=10 * PAGE, device="cuda", slots=2, host_budget=3 * PAGE)
    assert plan(pack, budget=20 * PAGE, device="cuda").host is None
