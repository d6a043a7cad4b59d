"""Page-locked memory: exactly what was asked for, in segments, all or nothing."""

import pytest
import torch

from simulated_device import SimulatedDevice
from specdec_kernels.stream.device import PinError
from specdec_kernels.stream.pinned import Arena, Ring


def test_exactly_what_was_booked_is_locked():
    """Case 42: five units of an odd size lock five times that size, where powers of two would lock far more."""
    device, unit = SimulatedDevice(), 307 * 4096
    arena = Arena(device, 5 * unit, segment=256 * 4096)
    memories = [arena.empty(unit) for _ in range(5)]
    assert arena.locked == sum(device.registered.values()) == 5 * unit
    assert len(device.registered) == 6 and max(device.registered.values()) == 256 * 4096
    assert all(m.data_ptr() % 4096 == 0 and arena.takes(m) for m in memories)
    with pytest.raises(ValueError, match="expected at most 0, what is left"):
        arena.empty(1)
    arena.close()
    assert not device.registered and arena.locked == 0


def test_a_copy_never_spans_two_segments():
    """The simulated device refuses one that does."""
    device = SimulatedDevice(0)
    arena = Arena(device, 10 * 4096, segment=4 * 4096)
    source, target = arena.empty(10 * 4096), torch.zeros(10 * 4096, dtype=torch.uint8)
    source.copy_(torch.arange(10 * 4096) % 251)
    arena.copy(target, source, device.stream())
    device.synchronize()
    assert torch.equal(source, target) and device.copies == 3


@pytest.mark.parametrize("k", range(5))
def test_registration_that_fails_at_piece_k_is_undone(k):
    """Case 53: rolled back, the error is cleared, and the next launch is clean."""
    device = SimulatedDevice(pinnable=k * 4096)
    with pytest.raises(PinError, match="4096 bytes of page-locked host memory can't be had"):
        Arena(device, 5 * 4096, segment=4096)
    assert device.refused == 1 and not device.registered and not device.stuck
    device.launch(lambda: None)


def test_an_arena_that_is_forgotten_is_unregistered():
    device = SimulatedDevice()
    arena = Arena(device, 4096)
    assert device.registered
    del arena
    assert not device.registered


def test_a_ring_waits_for_its_pieces():
    device, source = SimulatedDevice(0, "work"), torch.arange(50_000).to(torch.uint8)
    ring, stream, target = Ring(device, 4096, 2), device.stream(), torch.zeros(50_000, dtype=torch.uint8)
    ring.copy(target, source, stream)
    again = source.clone()
    source.fill_(7)  # the ring has it all
    device.synchronize()
    assert torch.equal(target, again) and ring.locked == 8192
    ring.close()
    assert not device.registered
