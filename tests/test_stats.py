"""Statistics: what is counted, what is None, what is bounded."""

import math
import weakref

import pytest

from specloop.counts import MOST_EVENTS, MOST_ROUNDS, Counts, Speculation
from specloop.stats import BatchStats, Stats, Timing


class Guard:
    """What the statistics ask of a guarded draft."""

    def __init__(self, draft="lookup"):
        self.draft, self.faults, self.seconds, self.off_reason = draft, [], 0.0, None


class Controller:
    reason = None

    def off_reason(self):
        return self.reason


def numbers(value):
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, float):
        yield value


def test_nothing_done_is_none_and_no_division():
    stats = Stats(batch=BatchStats())
    for report in (stats.as_dict()["speculation"], stats.as_dict()["batch"]["speculation"]):
        for name in ("acceptance_rate", "accepted_of_proposed", "tokens_per_pass", "mean_draft_length", "draft_ms"):
            assert report[name] is None, name
        assert report["per_position"] == report["acceptance_histogram"] == [] and report["by_source"] == {}
    assert stats.as_dict()["speculation"]["verify_ms"] is None
    assert set(stats.as_dict()["timing"].values()) == {None}
    assert [stats.as_dict()["batch"][name] for name in ("rows_per_pass", "tokens_per_pass", "verify_ms")] == [None] * 3


def test_plain_rounds_say_nothing_about_acceptance():
    counts = Speculation()
    counts.add(0, 0, 1, 0.5)
    report = counts.as_dict()
    assert (report["rounds"], report["rounds_without_draft"], report["tokens_per_pass"]) == (1, 1, 1.0)
    assert report["acceptance_rate"] is None and report["accepted_of_proposed"] is None
    assert report["mean_draft_length"] == 0.0 and report["fallbacks"] == 0 and report["acceptance_histogram"] == []


def test_the_sums_of_a_text():
    counts, guard, controller = Speculation(), Guard(), Controller()
    for proposed, accepted, tokens, source in [
        (3, 3, 4, "model"),
        (4, 1, 2, "lookup"),
        (0, 0, 1, None),
        (2, 0, 1, "model"),
        (2, 2, 1, "lookup"),  # an end cut the round: one of the accepted came into the text
    ]:
        guard.seconds += 0.25
        counts.add(proposed, accepted, tokens, 1.0, source=source, draft=guard, controller=controller)
    counts.end(guard, controller)
    report = counts.as_dict()
    assert [report[n] for n in ("rounds", "proposed", "evaluated", "accepted", "committed")] == [5, 11, 8, 6, 5]
    assert (report["rounds_without_draft"], report["fallbacks"]) == (1, 1)
    assert report["acceptance_rate"] == 6 / 8 and report["accepted_of_proposed"] == 6 / 11
    assert report["tokens_per_pass"] == 9 / 5 and report["mean_draft_length"] == 11 / 5
    assert report["per_position"] == [3 / 4, 2 / 3, 1.0]
    assert report["acceptance_histogram"] == [1, 1, 1, 1]
    assert report["by_source"]["lookup"] == {
        "rounds": 2,
        "proposed": 6,
        "evaluated": 4,
        "accepted": 3,
        "committed": 2,
        "evaluated_at": [2, 2],
        "accepted_at": [2, 1],
        "acceptance_rate": 3 / 4,
        "per_position": [1.0, 0.5],
    }
    assert report["by_source"]["model"]["committed"] == 3
    both = Speculation()
    both.merge(counts)
    both.merge(counts)
    assert both.by_source["lookup"].per_position == [1.0, 0.5] and both.by_source["lookup"].evaluated_at == [4, 4]
    assert (report["draft_ms"], report["verify_ms"]) == (1250.0, 5000.0)
    assert counts.seconds_history == [1.25] * 5 and report["round_ms"] == [1250.0] * 5
    assert (report["k_history"], report["accepted_history"]) == ([3, 4, 0, 2, 2], [3, 1, 0, 0, 2])


def test_a_tree_is_evaluated_by_levels():
    counts = Speculation()
    counts.add(7, 2, 3, 0.1, depth=4)
    assert counts.per_position == [1.0, 1.0, 0.0] and counts.acceptance_rate == 2 / 3 and counts.proposed == 7


def test_faults_and_switches_name_their_round():
    counts, guard, controller = Speculation(), Guard(), Controller()

    def rounds(n, proposed, accepted=0):
        for _ in range(n):
            counts.add(proposed, accepted, accepted + 1, 0.1, draft=guard, controller=controller)

    rounds(6, 2, 1)
    guard.faults.append("RuntimeError: boom")
    rounds(1, 0)
    rounds(1, 2, 2)
    controller.reason = "does not pay: 0.97x"
    rounds(1, 0)
    controller.reason = "does not pay: 0.96x"  # the same, with another number
    rounds(3, 0)
    controller.reason = None
    rounds(1, 2, 2)
    counts.end(guard, controller)
    assert [(e["round"], e["event"]) for e in counts.events] == [(7, "fault"), (9, "off"), (13, "on")]
    assert counts.events[0]["reason"] == "RuntimeError: boom" and "0.97x" in counts.events[1]["reason"]
    assert counts.faults == guard.faults and counts.fault_count == 1 and counts.off_reason is None
    assert counts.fallbacks == 0  # rounds without drafts are none


def test_another_draft_in_the_middle_adds_its_own():
    counts = Speculation()
    for seconds in (1.0, 2.0):  # a swap: the second begins from nothing
        guard = Guard()
        guard.seconds, guard.faults = seconds, ["x"]
        counts.add(1, 1, 2, 0.1, draft=guard, controller=Controller())
        counts.end(guard, Controller())
        counts.end(guard, Controller())  # memory ran out and decoding went on with the same draft
    assert counts.draft_seconds == 3.0 and counts.faults == ["x", "x"]


def test_statistics_keep_no_draft_alive():
    counts, guard = Speculation(), Guard()
    gone = weakref.ref(guard)
    counts.add(1, 1, 2, 0.1, draft=guard, controller=Controller())
    counts.end(guard, Controller())
    del guard
    assert gone() is None


def test_a_long_text_takes_bounded_memory():
    counts, guard = Speculation(), Guard()
    for i in range(5 * MOST_ROUNDS):
        guard.faults.append(str(i))
        counts.add(i % 7, 0, 1, 0.1, draft=guard, controller=Controller())
    for history in (counts.k_history, counts.accepted_history, counts.seconds_history):
        assert MOST_ROUNDS <= len(history) <= 2 * MOST_ROUNDS
    first = counts.first_round - 1
    assert counts.k_history == [i % 7 for i in range(first, 5 * MOST_ROUNDS)]
    assert len(counts.events) == len(counts.faults) == MOST_EVENTS and counts.fault_count == 5 * MOST_ROUNDS
    batch = BatchStats()
    for i in range(3 * MOST_ROUNDS):
        batch.add(i % 5, 1, 0.1)
    assert batch.size_history == [i % 5 for i in range(batch.first_pass - 1, 3 * MOST_ROUNDS)]
    assert len(batch.size_history) <= 2 * MOST_ROUNDS


def test_plain_equivalent_speed():
    timing = Timing(decode_seconds=2.0, row_seconds=0.1)
    report = timing.as_dict(40)
    assert report["tokens_per_second"] == 20 and report["plain_tokens_per_second"] == 10
    assert report["estimated_speedup"] == 2
    assert Timing(row_seconds=0.1).as_dict(0)["estimated_speedup"] is None


def test_a_batch_is_the_sum_of_its_requests():
    batch, each = BatchStats(), [Stats() for _ in range(2)]
    rounds = {0: [(3, 3), (3, 0), (0, 0)], 1: [(2, 1), (4, 4)]}
    for stats in each:
        batch.joined += 1
        stats.batch = batch
    for i in range(3):
        here = [(n, rounds[n][i]) for n in rounds if i < len(rounds[n])]
        for n, (proposed, accepted) in here:
            each[n].speculation.add(proposed, accepted, accepted + 1, 0.5, source=("lookup", "model")[n])
        batch.add(len(here), sum(k + 1 for _, (k, _) in here), 0.5)
        batch.tokens += sum(a + 1 for _, (_, a) in here)
    for stats in each:
        batch.leave(stats)
    report = each[0].as_dict()["batch"]
    assert [report[n] for n in ("joined", "finished", "passes", "rows", "tokens")] == [2, 2, 3, 17, 13]
    assert report["tokens_per_pass"] == 13 / 3 and report["rows_per_pass"] == 17 / 3
    assert report["size_history"] == [2, 2, 1] and report["verify_ms"] == 1500.0
    sums = report["speculation"]
    assert [sums[n] for n in ("rounds", "proposed", "evaluated", "accepted")] == [5, 12, 10, 8]
    assert sums["by_source"]["lookup"]["accepted"] == 3 and sums["by_source"]["model"]["accepted"] == 5
    assert sums["acceptance_histogram"] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("order", [1, -1])
def test_merge_takes_every_sum(order):
    """A field that is added to Counts and forgotten by merge shows here."""
    a, b = Counts(), Counts()
    a.add_round(3, 2, 1, 2, "lookup")
    b.add_round(5, 5, 5, 6, "model")
    b.add_round(0, 0, 0, 1, None)
    a.draft_seconds, b.fault_count = 1.0, 3
    total = Counts()
    for part in (a, b)[::order]:
        total.merge(part)
    for name, value in vars(a).items():
        if isinstance(value, int):
            assert getattr(total, name) == value + getattr(b, name), name
    assert total.draft_seconds == 1.0 and len(total.by_source) == 2
    assert all(math.isfinite(x) for x in numbers(total.as_dict()))
