"""Costs that are kept between loads: found again, never believed when they could be wrong, never in the way."""

import itertools
import json
import math
import os
import stat
import threading

import pytest
import torch

from specloop import calibration, costs
from specloop.calibration import cost_curve, identity
from specloop.pair import Pair


class Known:
    """A model that says what it is, and counts its passes. Its clock is its own: 1 ms per row."""

    now = 0.0

    def __init__(self, config="a", context=64):
        self.config, self.context, self.kv, self.passes = config, context, "int8", 0
        self.noise = None

    def new_cache(self, capacity):
        from scripted import ScriptedCache

        return ScriptedCache(capacity)

    def forward(self, tokens, cache, *, last):
        cache.ids.extend(tokens)
        self.passes += 1
        Known.now += 0.001 * len(tokens) * (self.noise() if self.noise else 1)
        return torch.zeros(last, 4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "WORTH_KEEPING", 0.0)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: Known.now)
    return tmp_path / "cache"


def files(folder):
    return sorted(folder.glob("*.json"))


def test_the_second_load_measures_nothing(folder):
    first, second = Known(), Known()
    measured, known = cost_curve(first)
    again, known_again = cost_curve(second)
    assert (known, known_again) == (False, True) and first.passes > 20 and second.passes == 0
    assert again.measured == measured.measured and len(again) == 16
    (file,) = files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [name for name in os.listdir(folder) if name != file.name] == []  # nothing half written


@pytest.mark.parametrize("change", ["config", "kv", "rows", "threads", "context", "kernels"])
def test_what_costs_depend_on_is_told_apart(folder, change, monkeypatch):
    cost_curve(Known())
    other = Known(config="b" if change == "config" else "a", context=8 if change == "context" else 64)
    if change == "kv":
        other.kv = "f32"
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    if change == "kernels":
        monkeypatch.setattr("specdec_kernels.__version__", "99")
    curve, known = cost_curve(other, 2 if change == "rows" else 16)
    assert not known and other.passes and len(files(folder)) == 2
    assert len(curve) == {"rows": 2, "context": 8}.get(change, 16)


def busy(*factors):
    model, spikes = Known(), itertools.cycle(factors)
    model.noise = lambda: next(spikes)
    return model


def test_what_was_measured_on_a_busy_machine_is_measured_again(folder):
    """And the least of both kept, until a measurement agrees with itself or with the one before."""
    curve, known = cost_curve(busy(1.0, 1.4, 3.0, 1.25, 2.0))
    assert not known and list(curve.measured) == sorted(curve.measured)
    again, known = cost_curve(busy(4.0, 5.6))
    assert not known and again.measured == curve.measured
    better, known = cost_curve(Known())
    assert not known and better.measured == pytest.approx(RISING)
    assert cost_curve(Known())[1]


def test_what_was_measured_on_a_busy_machine_keeps_nobody_from_trying(folder):
    """The rounds would find out that drafts are dear; that they are cheap only if there are some."""
    nominal = list(costs.NOMINAL)
    curve, _ = cost_curve(busy(1.0, 1.4, 3.0, 1.25, 2.0))  # each row as dear as the first, and then the noise
    assert [seconds / curve.measured[0] for seconds in curve.measured] == pytest.approx(nominal)
    for _ in range(20):  # the rounds say otherwise, which is no reason to forget what was measured
        curve.observe(1, 0.001)
        curve.observe(8, 0.008)
    assert files(folder)
    sure, _ = cost_curve(Known())
    assert max(sure.measured) / sure.measured[0] == pytest.approx(16) and nominal[-1] < 16
    assert costs.hopeful([2.0, 2.02, 9.0], (1.0, 1.1)) == [2.0, 2.02, pytest.approx(2.0 * 1.2)]


def test_two_measurements_that_agree_are_enough(folder, monkeypatch):
    noisy = lambda: ([0.001 * n for n in range(1, 17)], False)
    monkeypatch.setattr(calibration, "measure", lambda *args: noisy())
    assert [cost_curve(Known())[1] for _ in range(3)] == [False, False, True]


def test_a_model_that_does_not_say_what_it_is_is_measured(folder):
    model = Known(config=None)
    assert identity(model, 16) is None
    for _ in range(2):
        before = model.passes
        assert cost_curve(model)[1] is False and model.passes > before
    assert not folder.exists()


def entry(**changes):
    whole = {"form": 2, "about": identity(Known(), 16), "seconds": [0.001 * n for n in range(1, 17)], "sure": True}
    return whole | changes


RISING = [0.001 * n for n in range(1, 17)]
WRONG = {
    "empty": b"",
    "half": json.dumps(entry()).encode()[:-20],
    "binary": bytes(range(256)),
    "a list": b"[1, 2]",
    "deep": b"[" * 60000,
    "huge": b" " * (1 << 17) + json.dumps(entry()).encode(),
    "another form": json.dumps(entry(form=1)).encode(),
    "another model": json.dumps(entry(about=identity(Known("b"), 16))).encode(),
    "no identity": json.dumps(entry(about=None)).encode(),
    "not said whether sure": json.dumps(entry(sure=None)).encode(),
    "no costs": json.dumps(entry(seconds=None)).encode(),
    "too few": json.dumps(entry(seconds=RISING[:-1])).encode(),
    "too many": json.dumps(entry(seconds=[*RISING, 1.0])).encode(),
    "text": json.dumps(entry(seconds=["1"] * 16)).encode(),
    "booleans": json.dumps(entry(seconds=[True] * 16)).encode(),
    "a huge integer": json.dumps(entry(seconds=[*RISING[:-1], 10**400])).encode(),
    "zero": json.dumps(entry(seconds=[0.0, *RISING[1:]])).encode(),
    "negative": json.dumps(entry(seconds=[-1.0, *RISING[1:]])).encode(),
    "nan": json.dumps(entry(seconds=[float("nan"), *RISING[1:]])).encode(),
    "infinite": json.dumps(entry(seconds=[*RISING[:-1], float("inf")])).encode(),
    "hours": json.dumps(entry(seconds=[*RISING[:-1], 1e5])).encode(),
    "falling": json.dumps(entry(seconds=RISING[::-1])).encode(),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_not_believed_and_written_anew(folder, data):
    cost_curve(Known())
    (file,) = files(folder)
    file.write_bytes(data)
    model = Known()
    curve, known = cost_curve(model)
    assert not known and model.passes
    assert json.loads(file.read_bytes())["seconds"] == list(curve.measured)
    assert cost_curve(Known())[1]


def test_a_right_file_is_believed(folder):
    """What the wrong ones differ from."""
    cost_curve(Known())
    (file,) = files(folder)
    file.write_bytes(json.dumps(entry()).encode())
    curve, known = cost_curve(Known())
    assert known and list(curve.measured) == RISING


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_not_a_file_is_not_read(folder, kind, tmp_path):
    cost_curve(Known())
    (file,) = files(folder)
    data = file.read_bytes()
    file.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        file.mkdir()
    else:
        os.mkfifo(file)
    done = []
    thread = threading.Thread(target=lambda: done.append(cost_curve(Known())), daemon=True)
    thread.start()
    thread.join(10)
    assert done and done[0][1] is False
    if kind == "link":
        assert not file.is_symlink() and (tmp_path / "elsewhere").read_bytes() == data


def test_a_folder_that_can_t_be_used_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "WORTH_KEEPING", 0.0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "below"))
    assert len(cost_curve(Known())[0]) == 16
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "full"))

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibration.tempfile, "mkstemp", full)
    assert cost_curve(Known())[1] is False and files(tmp_path / "full") == []


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibration.json, "dump", full)
    assert cost_curve(Known())[1] is False and os.listdir(folder) == []


def test_old_files_go(folder, monkeypatch):
    monkeypatch.setattr(calibration, "MOST_FILES", 3)
    for n in range(5):
        cost_curve(Known(config=str(n)))
        os.utime(files(folder)[-1], None)
    assert len(files(folder)) == 3 and cost_curve(Known(config="4"))[1]


def test_rounds_that_disagree_have_the_next_load_measure(folder):
    curve, _ = cost_curve(Known())
    for _ in range(40):
        curve.observe(1, curve.measured[0])
        curve.observe(5, curve.measured[4] * 1.2)
    assert files(folder)  # 20 % is no reason
    for _ in range(40):
        curve.observe(1, curve.measured[0])
        curve.observe(5, curve.measured[4] * 2)
    assert files(folder) == []
    model = Known()
    assert cost_curve(model)[1] is False and model.passes
    for _ in range(40):  # only once: the file that is there now is another's
        curve.observe(5, curve.measured[4] * 2)
    assert files(folder)


def test_a_pair_loads_without_measuring(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "WORTH_KEEPING", 0.0)
    monkeypatch.setattr(costs, "TWICE", math.inf)
    from scripted import ToyTokenizer
    from tiny_llama import build

    def pair():
        return Pair(lambda: (build(), ToyTokenizer("abc"), None), k="auto", warm_up=True)

    with pair() as first:
        measured = first.costs.measured
        assert isinstance(first.costs, costs.CostCurve) and len(measured) == 16

    def never(*args):
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration, "measure", never)
    with pair() as second:
        assert second.costs.measured == measured
