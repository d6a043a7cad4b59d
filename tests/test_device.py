"""Every operation of every GPU backend on device tensors, against what the CPU gives for the same calls.

Without a GPU the same tests run on a few calls on the CPU emulator, which shows that the tests work and says nothing
about a device. bench/gpu_check.sh runs this file on a machine with one.
"""

import importlib
import os

import pytest
import torch

import device_calls
import emulator
import places
from specdec_kernels import gpu, registry, use_backend
from verify_cases import bounds, captured, keys

MORE = int(os.environ.get("SPECDEC_DEVICE_CALLS", "300"))  # random calls per operation; Triton compiles many variants
CALLS = {"emulator": 6, "triton": MORE // 10}
BAD_VALUE = 4


@pytest.fixture(scope="module", params=places.names())
def place(request):
    return places.place(request.param)


def need(place, operation):
    """Triton lacks some operations; everything else has everything."""
    if place.name == "triton" and operation not in place.operations:
        pytest.skip(f"triton: has no {operation}; cuda, hip and the emulator run this")
    assert operation in place.operations


def on(place, call):
    function, arguments, options = call
    with place.running():
        return function(*places.put(arguments, place.device), **places.put(options, place.device))


def parts(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


EXACT = ("quantize_int8", "dequantize_int8", "linear_int8", "rope_write_kv_int8", "rows_int8", "expand")
FUSED = (*device_calls.NORMS, *device_calls.GATES)  # sums and exp differ between devices, and so what is rounded


def differences(got, want, exact=True):
    """The positions at which two results differ; logprobs of verification may differ in rounding."""
    assert len(parts(got)) == len(parts(want))
    different = []
    for i, (a, b) in enumerate(zip(parts(got), parts(want), strict=True)):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        a, b = a.cpu(), b.cpu()
        assert a.shape == b.shape and a.dtype == b.dtype
        tolerance = 0 if exact or not b.is_floating_point() else 1e-5
        if not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            different.append(i)
    return different


def close(got, want):
    """Whether two results of a fused operation are equal but for rounding: a step in few values, 1 in few codes."""
    fine = True
    for a, b in zip(parts(got), parts(want), strict=True):
        a, b = a.cpu(), b.cpu()
        assert a.shape == b.shape and a.dtype == b.dtype
        if not b.is_floating_point():
            gap = (a.int() - b.int()).abs()
            off, fine = gap > 0, fine and not (gap > 1).any()
        elif b.dtype is torch.float32:
            off = ~torch.isclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            off = ~torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
            fine = fine and torch.allclose(a, b, rtol=2.0**-7, atol=2.0**-5, equal_nan=True)
        fine = fine and off.sum() <= 1 + off.numel() // 1000
    return fine


def agrees(place, call):
    """Whether the place gives what the CPU gives; False where only a comparison too close to call differs."""
    function, arguments, options = call
    want, normalised = captured(function, *arguments, **options)
    if function.__name__ in FUSED:
        assert close(on(place, call), want), f"{options}"
        return True
    exact = function.__name__ in EXACT
    different = differences(on(place, call), want, exact)
    if not different:
        return True
    assert not exact and function.__name__ != "attend_int8", f"{options}: results {different} differ"
    module = importlib.import_module(f"specdec_kernels.reference.{function.__name__}")
    assert any(module.fragile(*normalised)), f"{options}: results {different} differ"
    return False


def test_a_device_is_here():
    reasons = places.why_not()
    if len(places.names()) == 1:
        pytest.skip("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    assert torch.cuda.is_available()


def test_every_operation_has_calls(place):
    assert place.operations and place.operations <= device_calls.MAKERS.keys()


@pytest.mark.parametrize("operation", device_calls.MAKERS)
def test_random_calls_agree_with_the_cpu(place, operation):
    need(place, operation)
    count = CALLS.get(place.name, MORE)
    fragile = sum(not agrees(place, device_calls.MAKERS[operation](number)) for number in range(count))
    assert fragile <= max(1, count // 50), f"{fragile} of {count} calls differ in a fragile comparison"


def test_any_unit_of_multiplication_gives_the_same_bits(place, monkeypatch):
    need(place, "linear_int8")
    if place.name == "triton":
        pytest.skip("triton: the unit is not an option; cuda, hip and the emulator run this")
    monkeypatch.setattr(gpu.linear, "UNIT", 0)
    for number in range(CALLS.get(place.name, MORE)):
        assert agrees(place, device_calls.linear_int8(1000 + number))


@pytest.mark.parametrize("requests", [1, 2, 8])
def test_a_wide_vocabulary(place, requests):
    need(place, "verify")
    vocabulary = 151_936 if place.device == "cuda" else 5000
    for dtype in device_calls.FLOATS:
        assert agrees(place, device_calls.wide(requests, requests, vocabulary, dtype))


def test_the_same_bits_every_time_and_in_any_batch(place):
    need(place, "verify")
    vocabulary = 151_936 if place.device == "cuda" else 2000
    function, (rows, tokens, _), options = device_calls.wide(5, 6, vocabulary, torch.float32)
    options = {**options, "return_logprobs": True}
    call = function, (rows, tokens, bounds([3] * 6)), options
    first = [part.cpu() for part in on(place, call)]
    for _ in range(3 if place.device == "cuda" else 1):
        assert not differences(on(place, call), first)
    for b in range(6):
        alone = {**options, "draft_probs": options["draft_probs"][3 * b : 3 * b + 3]}
        alone |= {name: options[name][b : b + 1] for name in ("seed", "position")}
        one = function, (rows[4 * b : 4 * b + 4], tokens[3 * b : 3 * b + 3], bounds([3])), alone
        assert not differences(on(place, one), [part[b : b + 1] for part in first])


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_any_split_of_the_vocabulary_gives_the_same_bits(place, chunks, monkeypatch):
    need(place, "verify")
    if place.name == "triton":
        pytest.skip("triton: the split is not an option; cuda, hip and the emulator run this")
    call = device_calls.wide(7, 2, 30_000 if place.device == "cuda" else 2000, torch.bfloat16)
    function, arguments, options = places.put(call, place.device)
    options["return_logprobs"] = True
    with place.running():
        want = function(*arguments, **options)
        monkeypatch.setattr(gpu.verify, "CHUNKS", chunks)
        assert not differences(function(*arguments, **options), want)


@pytest.mark.parametrize("operation", ["verify", "sample", "quantize_int8"])
def test_rows_beyond_32_bits(place, operation):
    need(place, operation)
    stride, vocabulary = 2**31 + 8, 1000
    rows = torch.randn(3, vocabulary).to(torch.bfloat16)
    far = place.matrix((3, vocabulary), torch.bfloat16, stride)
    if far is None:
        pytest.skip(f"{place.name}: its memory has no room for {stride >> 28} GiB; the emulator runs this everywhere")
    far.copy_(rows)
    function, more, options = {
        "verify": (device_calls.sk.verify, (rows[:2].argmax(1), bounds([2])), {"max_drafts": 2, **keys(1)}),
        "sample": (device_calls.sk.sample, (), keys(3)),
        "quantize_int8": (device_calls.sk.quantize_int8, (), {}),
    }[operation]
    want = function(rows, *more, **options)
    more, options = places.put((more, options), place.device)
    with place.running():
        assert not differences(function(far, *more, **options), want)


# ---- bad values --------------------------------------------------------------------------------------------------

POSITIONS = {"draft_tokens": 1, "cu_drafts": 2, "temperature": 7, "top_p": 9, "min_p": 10, "theta": 14}
BAD = {
    "a draft id beyond the vocabulary": ("draft_tokens", lambda t: t.index_fill(0, torch.tensor([4]), 10**9)),
    "a draft id below -1": ("draft_tokens", lambda t: t.index_fill(0, torch.tensor([4]), -2)),
    "bounds beyond the drafts": ("cu_drafts", lambda t: torch.tensor([0, 3, 2**30, 2**30 + 3]).int()),
    "bounds below zero": ("cu_drafts", lambda t: torch.tensor([0, 3, -6, 9]).int()),
    "descending bounds": ("cu_drafts", lambda t: torch.tensor([0, 6, 3, 9]).int()),
    "more drafts than the output holds": ("cu_drafts", lambda t: torch.tensor([0, 3, 9, 9]).int()),
    "a NaN temperature": ("temperature", lambda t: torch.tensor([0.8, torch.nan, 0.8])),
    "a negative temperature": ("temperature", lambda t: torch.tensor([0.8, -1.0, 0.8])),
    "a NaN top_p": ("top_p", lambda t: torch.tensor([0.9, torch.nan, 0.9])),
    "a negative top_p": ("top_p", lambda t: torch.tensor([0.9, -0.5, 0.9])),
    "a min_p above 1": ("min_p", lambda t: torch.tensor([0.0, 1.5, 0.0])),
    "a NaN theta": ("theta", lambda t: torch.tensor([0.5, torch.nan, 0.5])),
}


def good_call(name):
    function, (rows, tokens, cu), options = device_calls.wide(2, 3, 200, torch.float32)
    options = {**options, "temperature": torch.full((3,), 0.8), "top_p": torch.full((3,), 0.9), "return_logprobs": True}
    options["min_p"] = torch.zeros(3)
    if name == "theta":
        options |= {"rule": "threshold", "theta": torch.full((3,), 0.5)}
    return function, (rows, tokens, cu), options


@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_flags_its_request_and_no_other(place, case):
    """Handed over behind the public function's back: there, values of CPU tensors would be refused."""
    need(place, "verify")
    name, spoil = BAD[case]
    function, arguments, options = good_call(name)
    _, normalised = captured(function, *arguments, **options)
    normalised = list(normalised)
    normalised[POSITIONS[name]] = spoil(normalised[POSITIONS[name]])
    *inputs, _, _, _, _ = normalised
    outputs = [torch.empty_like(part).fill_(99) for part in normalised[-4:]]
    with use_backend("reference"):
        registry.call("verify", "cpu", *inputs, *outputs)
    there = places.put(tuple(normalised[-4:]), place.device)
    with place.running():
        registry.call("verify", place.device, *places.put(tuple(inputs), place.device), *there)
    tokens, accepted, logprobs, flags = (part.cpu() for part in there)
    assert flags[1] & BAD_VALUE and accepted[1] == 0 and (tokens[1] == -1).all() and logprobs[1].isnan().all()
    assert not differences((tokens, accepted, logprobs, flags), outputs, exact=False)


# ---- streams and graphs ------------------------------------------------------------------------------------------

FUSED_STEP = ("rms_norm_quantize_int8", "silu_mul_quantize_int8")
STEP = ("verify", "verify_tree", "sample", "quantize_int8", "linear_int8", "attend_int8", *FUSED_STEP)


def same_step(name, got, want):
    return close(got, want) if name in FUSED else not differences(got, want, exact=name in EXACT)


def packed(n, k, group=64):
    return device_calls.sk.pack_int8(torch.randn(n, k), group_size=group, rotate=True)


def step(place, name):
    """A call on the device whose inputs can be changed in place: (its tensors, function of no arguments)."""
    torch.manual_seed(1)
    tree, plain = device_calls.verify_tree(155), {"temperature": 0.8, "top_p": 1.0, "min_p": 0.0}
    call = {
        "verify": lambda: device_calls.wide(1, 2, 3000, torch.float32),
        "verify_tree": lambda: (*tree[:2], {**tree[2], **plain}),
        "sample": lambda: (device_calls.sk.sample, (torch.randn(4, 3000),), keys(4)),
        "quantize_int8": lambda: (device_calls.sk.quantize_int8, (torch.randn(4, 640),), {}),
        "linear_int8": lambda: (device_calls.sk.linear_int8, (torch.randn(4, 640), packed(64, 640)), {}),
        "attend_int8": lambda: device_calls.attend_int8(1),
        "rms_norm_quantize_int8": lambda: (
            device_calls.sk.rms_norm_quantize_int8,
            (torch.randn(4, 640), torch.randn(640), 1e-5),
            {"group_size": 64, "residual": torch.randn(4, 640)},
        ),
        "silu_mul_quantize_int8": lambda: (device_calls.sk.silu_mul_quantize_int8, (torch.randn(4, 640),), {}),
    }[name]()
    function, arguments, options = call
    there, more = places.put((arguments, options), place.device)
    return function, there, more


@pytest.mark.parametrize("name", STEP)
def test_a_captured_call_sees_changed_inputs(place, name):
    need(place, name)
    function, arguments, options = step(place, name)
    with place.running():
        outputs, replay = place.capture(lambda: parts(function(*arguments, **options)))
        for _ in range(2):
            arguments[0].copy_(torch.randn(arguments[0].shape) * 3)
            if "position" in options:
                options["position"].add_(1)
            replay()
            cpu, more = places.put((arguments, options), "cpu")
            assert same_step(name, outputs, _elsewhere(function, cpu, more))


def _elsewhere(function, arguments, options):
    with use_backend("reference"):
        return parts(function(*arguments, **options))


@pytest.mark.parametrize("name", STEP)
def test_no_call_waits_for_the_device(place, name):
    need(place, name)
    function, arguments, options = step(place, name)
    with place.running():
        function(*arguments, **options)  # the first call may load or compile
        with place.no_waiting():
            result = function(*arguments, **options)
    cpu, more = places.put((arguments, options), "cpu")
    assert same_step(name, result, _elsewhere(function, cpu, more))


def test_weights_are_packed_where_they_are(place):
    """By whichever backend does that; no value goes through the CPU."""
    w = torch.randn(70, 128).to(torch.bfloat16)
    there = w.to(place.device)
    with place.no_waiting():
        weights = [device_calls.sk.pack_int8(there, group_size=g, rotate=r) for g, r in ((None, False), (32, True))]
    for weight, want in zip(weights, ((None, False), (32, True)), strict=True):
        expected = device_calls.sk.pack_int8(w, group_size=want[0], rotate=want[1])
        assert torch.equal(weight.codes.cpu(), expected.codes) and torch.equal(weight.scale.cpu(), expected.scale)


@pytest.mark.parametrize("name", STEP[:3])
def test_a_compiled_call_gives_the_same(place, name):
    need(place, name)
    function, arguments, options = step(place, name)
    options["return_logprobs"] = True
    with place.running():
        compiled = torch.compile(lambda *tensors: function(*tensors, **options), backend="aot_eager", fullgraph=True)
        assert not differences(compiled(*arguments), function(*arguments, **options))


@pytest.mark.parametrize("operation", sorted(device_calls.MAKERS.keys() - {"attend_int8"}))  # that is torch's
def test_every_launch_gets_the_device_and_the_stream(operation):
    """On the emulator, whose module is told of a stream that no launch there looks at."""
    launches = []

    class Module:
        def __getattr__(self, name):
            def launch(*arguments):
                launches.append((name, arguments[-2:]))
                return getattr(emulator.compiled(), name)(*arguments[:-2], 0, 0)

            return getattr(emulator.compiled(), name) if name.startswith("plan") else launch

    function, arguments, options = device_calls.MAKERS[operation](1)
    with emulator.serve(gpu.operations(Module(), lambda tensor: (3, 12345))):
        function(*arguments, **options)
    assert launches and all(where == (3, 12345) for _, where in launches), launches


def test_the_current_stream_is_used(place):
    """Queued on one stream behind a long copy into its input: on any other stream the call would read old values."""
    need(place, "quantize_int8")
    if place.device != "cuda":
        pytest.skip("the emulator has no streams; the test above shows what can be shown without one")
    x, new = torch.zeros(64, 4096, device="cuda"), torch.randn(64, 4096)
    big = torch.empty(2**28, dtype=torch.int8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with place.running(), torch.cuda.stream(stream):
        pinned = new.pin_memory()
        for _ in range(20):
            big.copy_(big.roll(1))
        x.copy_(pinned, non_blocking=True)
        got = device_calls.sk.quantize_int8(x)
    torch.cuda.synchronize()
    assert not differences(got, device_calls.sk.quantize_int8(new))
