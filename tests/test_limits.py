"""Byte budgets as they are written, and the memory that a machine laid out in a folder leaves a process."""

import os
import re
from pathlib import Path

import pytest

from specdec_kernels.stream import BudgetError, available_memory, memory_limit, parse_bytes

MB = 1 << 20


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (120_000_000, 120_000_000),
        (2**63 + 1, 2**63 + 1),
        (1.5e9, 1_500_000_000),
        ("120MB", 120 * 10**6),
        ("120MiB", 120 * MB),
        (" 120 mib ", 120 * MB),
        ("1.5GB", 1_500_000_000),
        (".5GiB", 1 << 29),
        ("9007199254740993", 2**53 + 1),
        ("9007.199254740993TB", 9007199254740993),
        ("7", 7),
        ("7B", 7),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2TiB", 2 << 40),
    ],
)
def test_bytes(value, expected):
    count = parse_bytes(value)
    assert count == expected and type(count) is int


@pytest.mark.parametrize(
    "value",
    [0, -1, True, False, 0.5, float("nan"), float("inf"), -1e9, None, [], b"120MB", 1j],
)
def test_what_is_no_number_of_bytes(value):
    assert_refused(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "MB",
        "12x",
        "12 m",
        "1e3",
        "-5MB",
        "+5MB",
        "0",
        "0.0GB",
        "0.1",
        "1.MB",
        "1,5GB",
        "1_000",
        "120MB!",
        "nan",
        "١٢",
    ],
)
def test_texts_that_are_no_number_of_bytes(value):
    assert_refused(value)


def assert_refused(value):
    with pytest.raises(BudgetError, match=re.escape(f"got {value!r}")) as caught:
        parse_bytes(value, "host_budget")
    assert str(caught.value).startswith("host_budget: expected ")


def test_numbers_of_numpy():
    numpy = pytest.importorskip("numpy", reason="its numbers are what is tested")
    assert parse_bytes(numpy.int32(7)) == 7
    with pytest.raises(BudgetError):
        parse_bytes(numpy.int32(-7))


# ---- machines ---------------------------------------------------------------------------------------


class Machine:
    """Files under a folder: /proc/meminfo (in MB) and what is put there."""

    def __init__(self, root, total=1000, available=800):
        self.root = Path(root)
        self.put("/proc/meminfo", f"MemTotal: {total << 10} kB\nMemFree: 1 kB\nMemAvailable: {available << 10} kB\n")

    def put(self, path, text):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}")

    def version_2(self, path, above="/", top="/sys/fs/cgroup"):
        self.put("/proc/self/cgroup", f"0::{path}\n")
        self.put("/proc/self/mountinfo", f"29 20 0:26 {above} {top} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")

    def version_1(self, path, above="/"):
        self.put("/proc/self/cgroup", f"5:cpu,cpuacct:/x\n4:memory:{path}\n1:name=systemd:/\n0::/\n")
        lines = [f"35 31 0:32 {above} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"]
        lines += ["32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"]
        self.put("/proc/self/mountinfo", "\n".join(lines) + "\n")

    def answers(self):
        return tuple(
            (memory.nbytes // MB, memory.why) for memory in (memory_limit(self.root), available_memory(self.root))
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_groups(machine):
    assert machine.answers() == ((1000, "MemTotal of the machine"), (800, "MemAvailable of the machine"))


def test_version_2_takes_the_least_on_the_way_up(machine):
    machine.version_2("/a/b/c")
    group = "/sys/fs/cgroup"
    machine.put(f"{group}/a/memory.max", 400 * MB)
    machine.put(f"{group}/a/memory.current", 350 * MB)
    machine.put(f"{group}/a/memory.stat", f"anon 1\nactive_file {30 * MB}\ninactive_file {50 * MB}\n")
    machine.put(f"{group}/a/b/memory.max", "max\n")
    machine.put(f"{group}/a/b/memory.high", 300 * MB)
    machine.put(f"{group}/a/b/memory.current", 10 * MB)
    machine.put(f"{group}/a/b/memory.stat", "inactive_file 0\n")
    machine.put(f"{group}/a/b/c/memory.max", 500 * MB)
    assert machine.answers() == ((300, f"{group}/a/b/memory.high"), (100, f"what is left of {group}/a/memory.max"))


def test_a_group_that_has_nothing_left(machine):
    machine.version_2("/a")
    machine.put("/sys/fs/cgroup/a/memory.max", 100 * MB)
    machine.put("/sys/fs/cgroup/a/memory.current", 120 * MB)
    machine.put("/sys/fs/cgroup/a/memory.stat", "inactive_file 0\n")
    assert available_memory(machine.root).nbytes == 0


@pytest.mark.parametrize(
    ("path", "above"),
    [("/", "/"), ("/docker/1f", "/docker/1f"), ("/../../other", "/"), ("/elsewhere", "/docker/1f")],
)
def test_a_container_sees_its_own_group_at_the_top(machine, path, above):
    machine.version_2(path, above)
    machine.put("/sys/fs/cgroup/memory.max", 256 * MB)
    assert machine.answers()[0] == (256, "/sys/fs/cgroup/memory.max")


def test_part_of_the_tree_is_mounted(machine):
    machine.version_2("/pods/7/main", "/pods", top="/mnt/my\\040groups")
    machine.put("/mnt/my groups/7/main/memory.max", 128 * MB)
    assert machine.answers()[0] == (128, "/mnt/my groups/7/main/memory.max")


def test_version_1(machine):
    machine.version_1("/a/b")
    group = "/sys/fs/cgroup/memory"
    machine.put(f"{group}/memory.limit_in_bytes", 9223372036854771712)
    machine.put(f"{group}/a/memory.limit_in_bytes", 600 * MB)
    machine.put(f"{group}/a/memory.usage_in_bytes", 500 * MB)
    machine.put(f"{group}/a/memory.stat", f"inactive_file 5\ntotal_inactive_file {200 * MB}\n")
    machine.put(f"{group}/a/b/memory.limit_in_bytes", 700 * MB)
    wanted = ((600, f"{group}/a/memory.limit_in_bytes"), (300, f"what is left of {group}/a/memory.limit_in_bytes"))
    assert machine.answers() == wanted


def test_the_machine_bounds_the_groups(machine):
    machine.version_2("/")
    machine.put("/sys/fs/cgroup/memory.max", 10**15)
    machine.put("/sys/fs/cgroup/memory.current", MB)
    assert machine.answers() == ((1000, "MemTotal of the machine"), (800, "MemAvailable of the machine"))


def test_files_that_say_nothing(machine):
    machine.version_2("/a")
    machine.put("/sys/fs/cgroup/a/memory.max", "much")
    machine.put("/sys/fs/cgroup/memory.max", 300 * MB)  # but how much is in use can't be read
    assert machine.answers() == (
        (300, "/sys/fs/cgroup/memory.max"),
        (300, "what is left of /sys/fs/cgroup/memory.max"),
    )


def test_a_system_without_proc(tmp_path, monkeypatch):
    settings = {"SC_PHYS_PAGES": 1000, "SC_AVPHYS_PAGES": 500, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", settings.__getitem__, raising=False)
    assert memory_limit(tmp_path) == (4096000, "SC_PHYS_PAGES of the machine")
    assert available_memory(tmp_path) == (2048000, "SC_AVPHYS_PAGES of the machine")
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(BudgetError, match="budget: expected a number of bytes, since this system does not tell"):
        memory_limit(tmp_path)


def test_this_machine():
    limit, available = memory_limit(), available_memory()
    assert 0 < available.nbytes <= limit.nbytes and limit.why and available.why
