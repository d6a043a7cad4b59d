"""Streaming to a GPU: the bits of resident weights, whatever is slow; needed waits; graphs; page-locked memory.

Without a GPU the same tests run on the simulated device (simulated_device.py), which shows that the tests work; what it
can show by itself is in test_uploads.py.
"""

import contextlib
import functools

import pytest
import torch

import places
import specdec_kernels as sk
from simulated_device import SimulatedDevice
from specdec_kernels.stream import Pack, PackWriter, StreamError, WeightStream, plan
from specdec_kernels.stream.device import PinError, TorchDevice
from specloop.convert import cached_pack
from specloop.formats.gguf_checkpoint import GGUFCheckpoint
from specloop.loader import load_model, model_config
from specloop.models.llama import Llama
from specloop.models.weights import Streamed
from streams import device_plan, parts, plan_of, same
from test_loader import write

N, K, BLOCKS, SLOW = 512, 256, 6, 3_000_000  # SLOW: cycles of a multiprocessor, a millisecond or two


class Slowed(TorchDevice):
    """A GPU on which copies or work come late, and which forgets some waits."""

    def __init__(self, slow=None, without=(), pinnable=None):
        super().__init__("cuda")
        self.slow, self.without, self.pinnable, self.refused = slow, without, pinnable, 0
        self.main = torch.cuda.current_stream()

    def copy(self, target, source, stream):
        if self.slow == "copies":
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLOW)
        super().copy(target, source, stream)

    def wait(self, stream, event):
        if ("copy done" if stream == self.main else "slot free") not in self.without:
            super().wait(stream, event)

    def register(self, address, nbytes):
        if self.pinnable is not None and nbytes > self.pinnable:
            self.refused += 1
            raise PinError(f"{nbytes} bytes of page-locked host memory can't be had: the test says so")
        return super().register(address, nbytes)

    def launch(self, function):
        if self.slow == "work":
            torch.cuda._sleep(SLOW)
        function()

    def synchronize(self):
        torch.cuda.synchronize()


class Simulated(SimulatedDevice):
    """The other way to say it: what is slow lies still while the rest runs ahead."""

    def __init__(self, slow=None, without=(), pinnable=None):
        eager = {"copies": "work", "work": "copies", None: None}[slow]
        super().__init__(1, eager, without, pinnable)


@pytest.fixture(scope="module", params=[name for name in places.names() if name != "triton"])
def place(request):
    return places.place(request.param)


@pytest.fixture
def device(place):
    return Simulated if place.name == "emulator" else Slowed


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    path = tmp_path_factory.mktemp("device") / "pack"
    generator = torch.Generator().manual_seed(0)
    with PackWriter(path, {}) as writer:
        for i in range(BLOCKS):
            matrix = torch.randn(N, K, generator=generator)
            parts = {"matrix": sk.pack_int8(matrix, group_size=64, rotate=True), "norm": torch.randn(K).bfloat16()}
            writer.add_block(f"layer.{i}", parts)
    with Pack.open(path) as pack:
        yield pack


def on_cpu(found):
    return {name: [piece.cpu() for piece in pieces] for name, pieces in found.items()}


def wrong_blocks(pack, device, passes=3, slots=2, **options):
    """How many of the blocks that work on the device saw were not those of the file, and the statistics."""
    planned, seen = device_plan(pack, slots, resident=(2,)), []
    with WeightStream(pack, planned, device=device, **options) as stream:
        for _ in range(passes):
            for block in stream.blocks():
                device.launch(lambda b=block: seen.append((b.index, parts(b.tensors))))
        device.synchronize()
        stats = stream.stats
    with WeightStream(pack, plan_of(pack, 1, range(BLOCKS))) as stream:
        expected = [parts(block.tensors) for block in stream.blocks()]
    assert [index for index, _ in seen] == list(range(BLOCKS)) * passes
    return sum(not same(on_cpu(found), expected[index]) for index, found in seen), stats


@pytest.mark.parametrize("slow", ["copies", "work", None])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_streamed_blocks_are_those_of_the_file(pack, device, slow, slots):
    wrong, stats = wrong_blocks(pack, device(slow), slots=slots)
    assert wrong == 0 and stats.active and stats.link in ("pinned", "pageable")
    assert stats.copied_bytes > stats.resident_bytes > 0


@pytest.mark.parametrize("without, slow", [("copy done", "copies"), ("slot free", "work")])
def test_without_a_wait_some_are_not(pack, device, without, slow):
    """Else the test above could not fail."""
    wrong, _ = wrong_blocks(pack, device(slow, (without,)))
    assert wrong > 0


@pytest.mark.parametrize("kind", ["no_pin", "ring", "pageable"])
def test_without_page_locked_memory(pack, device, kind, monkeypatch):
    monkeypatch.setattr("specdec_kernels.stream.uploads.PIECE", 8192)
    refusing = device("copies", pinnable={"no_pin": 0, "ring": 4 * 8192, "pageable": 0}[kind])
    wrong, stats = wrong_blocks(pack, refusing, no_pin=kind == "no_pin")
    assert wrong == 0 and stats.link == ("ring" if kind == "ring" else "pageable")
    assert stats.pinned_bytes == (4 * 8192 if kind == "ring" else 0)
    assert refusing.refused == {"no_pin": 0, "ring": 1, "pageable": 2}[kind]


def test_work_on_a_block_is_captured_once_per_slot(pack, place, device):
    """Weights become bf16 in a scratch matrix and are multiplied: captured for a block in a slot, replayed whenever the
    block is there again, with others having been in the slot in between."""
    device = device()
    x, scratch, y = (torch.randn(size).to(place.device) for size in ((5, K), (N, K), (5, N)))
    scratch, captured, found = scratch.bfloat16(), {}, []

    def work(matrix):
        sk.expand(matrix, out=scratch)
        torch.mm(x, scratch.float().t(), out=y)

    with WeightStream(pack, device_plan(pack, 2, (2,)), device=device, poison=True) as stream:
        for _ in range(6):
            for block in stream.blocks():
                key, run = (block.index, block.slot), functools.partial(work, block.tensors["matrix"])
                if key not in captured:
                    with place.running():
                        captured[key] = run if place.name == "emulator" else sk.capture(run, place.device)
                device.launch(lambda i=block.index, again=captured[key]: (again(), found.append((i, y.clone()))))
        device.synchronize()
    assert len(captured) < len(found)
    weights = {}
    with WeightStream(pack, plan_of(pack, 1, range(BLOCKS))) as stream:
        for block in stream.blocks():
            weights[block.index] = block.tensors["matrix"].dequantize().bfloat16().float()
    for index, y in found:
        want = x.cpu() @ weights[index].t()
        torch.testing.assert_close(y.cpu(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_a_pass_waits_for_nothing(pack, place, device):
    """torch is told to raise where its own calls would wait for the device."""
    device, seen = device(), []
    with WeightStream(pack, device_plan(pack, 2), device=device) as stream:
        for block in stream.blocks():
            device.launch(lambda b=block: seen.append(b.index))
        with place.no_waiting():
            for block in stream.blocks():
                device.launch(lambda b=block: seen.append(b.index))
        device.synchronize()
    assert seen == list(range(BLOCKS)) * 2


def test_a_whole_pass_is_not_captured(pack, place, device):
    if place.name == "emulator":
        pytest.skip("the emulator captures nothing (test_torch_device.py shows the refusal)")
    with WeightStream(pack, device_plan(pack, 2), device=device()) as stream:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device=place.device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x.add_(1)
            with pytest.raises(StreamError, match="can't be captured as a whole"):
                next(stream.blocks())
        graph.replay()
        assert x.item() == 1
        assert [block.index for block in stream.blocks()] == list(range(BLOCKS))


def test_an_error_of_registering_leaves_nothing_behind(place):
    if place.name == "emulator":
        pytest.skip("the simulated device refuses by itself (test_uploads.py)")
    device = TorchDevice("cuda")
    for _ in range(3):
        with pytest.raises(PinError, match="page-locked host memory can't be had"):
            device.register(4096, 4096)  # nothing is mapped there
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_model_streams_to_the_device(place, tmp_path, monkeypatch):
    """A llama whose blocks come through slots gives the logits of one that is all in memory. The simulated device keeps
    its streams in step here, as the model's work does not wait in its queues."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    source = str(write(tmp_path / "tiny.gguf", tied=True))
    with GGUFCheckpoint(source) as checkpoint:
        path = cached_pack(checkpoint, dtype="int8")
    want = [forward(load_model(source, context=64, kv="f32")[0], n) for n in (5, 1, 17)]
    with Pack.open(path) as pack:
        nbytes, least = pack.nbytes, plan(pack, device="cuda", budget=pack.nbytes).minimum
    for budget in (least, (least + nbytes) // 2):
        for host_budget in (nbytes, plan(path, budget=nbytes).minimum):
            pack = Pack.open(path)  # a model's weights close theirs
            planned = plan(pack, device="cuda", budget=budget, host_budget=host_budget)
            there = SimulatedDevice(0, "all") if place.name == "emulator" else None
            stream = WeightStream(pack, planned, device=there)
            model = Llama(
                model_config(pack)[0], Streamed(stream, place.device), context=64, kv="f32", eos_ids=(), name=""
            )
            with contextlib.nullcontext() if place.name == "emulator" else place.running():
                for _ in range(2):
                    for logits, n in zip(want, (5, 1, 17), strict=True):
                        got = forward(model, n)
                        if place.name == "emulator":
                            assert torch.equal(got, logits)
                        torch.testing.assert_close(got, logits, rtol=1e-3, atol=1e-3)
            assert stream.stats.active and stream.stats.copied_bytes > stream.stats.resident_bytes
            model.close()


def forward(model, n):
    return model.forward([(7 * i + n) % 200 for i in range(n)], model.new_cache(), last=n).cpu().clone()
