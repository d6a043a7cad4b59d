"""bench/gpu_check.sh and bench/bench_gpu.py where there is no GPU: their dry runs, refusals, and the rivals' law."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types

import pytest
import torch

from gpu_compilers import ROOT

SCRIPT, BENCH = ROOT / "bench" / "gpu_check.sh", ROOT / "bench" / "bench_gpu.py"


def run(*command, **variables):
    path = os.pathsep.join(p for p in sys.path if p)  # the package that these tests test
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path, **variables}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)


def bash():
    found = shutil.which("bash")
    if found is None:
        pytest.skip("bash is not installed")
    return found


def results(folder):
    (path,) = folder.iterdir()  # no temporary file is left
    assert path.name == "dry-run-on-a-cpu.json"
    facts = json.loads(path.read_text())
    assert facts["dry_run"] and not facts["failed"] and facts["versions"]["torch"] == torch.__version__
    return facts


def test_dry_run_of_the_benchmark_writes_the_result(tmp_path):
    done = run(sys.executable, BENCH, "--device", "cpu", "--out", tmp_path / "out", "--pairs", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = results(tmp_path / "out")
    assert facts["left_out"] == 0 and facts["copy_gbps"] > 0 and facts["tests"] is None
    operations = {"verify", "sample", "quantize_int8", "dequantize_int8", "linear_int8", "expand", "attend_int8"}
    assert {r["operation"] for r in facts["results"]} == operations
    (streamed,) = facts["streaming"]
    assert streamed["kind"] == "file" and streamed["gbps"] > 0 and streamed["share_of_link"] > 0
    for result in facts["results"]:
        assert result["us"] > 0 and result["gbps"] > 0 and result["share_of_copy"] > 0 and result["call_us"] > 0
        if result["rival"]:
            assert result["interval"][0] <= result["ratio"] <= result["interval"][1]


def test_the_time_limit_leaves_out_and_says_so(tmp_path):
    done = run(sys.executable, BENCH, "--device", "cpu", "--out", tmp_path / "out", "--seconds", 0)
    facts = results(tmp_path / "out")
    assert done.returncode == 0 and not facts["results"] and not facts["streaming"] and facts["left_out"] > 5


def test_a_dry_run_is_not_put_among_the_results():
    done = run(sys.executable, BENCH, "--device", "cpu")
    assert done.returncode == 2 and "--device cpu: needs --out" in done.stderr
    assert not list((ROOT / "bench").glob("results/dry*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_say_so():
    done = run(sys.executable, BENCH)
    assert done.returncode == 2 and "torch sees no GPU" in done.stderr
    done = run(bash(), SCRIPT)
    assert done.returncode == 1 and "sees no GPU" in done.stderr


def test_the_script_is_well_formed_and_explains_itself():
    assert run(bash(), "-n", SCRIPT).returncode == 0
    done = run(bash(), SCRIPT, "--help")
    assert done.returncode == 2 and "--dry-run DIR" in done.stdout and "No GPU has run this yet" in done.stdout


@pytest.mark.parametrize(("kind", "arch"), [("cuda", "90"), ("hip", "gfx942")])
@pytest.mark.parametrize("tests_pass", [True, False])
def test_the_steps_on_a_device(tmp_path, kind, arch, tests_pass):
    """With a stand-in for Python that says which device there is and writes down what it is asked to do."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$SPECDEC_WITH_CUDA,$SPECDEC_CUDA_ARCHS,$SPECDEC_WITH_HIP,$SPECDEC_HIP_ARCHS: $*" >> {log}\n'
        f'case "$*" in -) cat > /dev/null; echo {kind} {arch};; *pytest*) exit {int(not tests_pass)};; esac\n'
    )
    python.chmod(0o755)
    done = run(bash(), SCRIPT, PYTHON=str(python))
    assert done.returncode == int(not tests_pass), done.stdout + done.stderr
    variables = {"cuda": "1,90,,:", "hip": "0,,1,gfx942:"}[kind]
    lines = log.read_text().splitlines()[1:]
    assert all(line.startswith(variables) for line in lines)
    wanted = ["pip install", "-m specdec_kernels", f"/{kind}.xml", "/triton.xml", "bench_gpu.py --device cuda --out"]
    places = [next(i for i, line in enumerate(lines) if text in line) for text in wanted]
    assert places == sorted(places)


@pytest.mark.slow
def test_dry_run_of_the_script(tmp_path):
    done = run(bash(), SCRIPT, "--dry-run", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = results(tmp_path / "out")
    counts = facts["tests"]["emulator"]
    assert counts["passed"] > 10 and counts["failures"] == counts["errors"] == 0


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    spec = importlib.util.spec_from_file_location("gpu_rivals", ROOT / "bench" / "gpu_rivals.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flashinfer_is_called_as_its_versions_want(rivals, monkeypatch):
    """On a stand-in with FlashInfer's signatures, which shows that what is around the calls works and nothing else."""
    seen = {}

    def chain(draft_probs, draft_token_ids, target_probs, seed=None, offset=None):
        seen.update(seed=seed, offset=offset)
        assert draft_token_ids.dtype == torch.int32 and target_probs.shape == (2, 5, 9)
        assert torch.allclose(target_probs.sum(-1), torch.ones(2, 5))
        return draft_token_ids, None, None

    sampling = types.ModuleType("flashinfer.sampling")
    sampling.softmax = lambda logits, temperature: (logits / temperature).softmax(-1)
    sampling.top_p_renorm_probs = lambda probs, top_p: probs
    package = types.ModuleType("flashinfer")
    package.sampling = sampling
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", sampling)
    arguments = torch.randn(2, 5, 9), torch.zeros(2, 4, dtype=torch.int32), 0.7, 0.9, torch.rand(2, 4, 9)
    sampling.chain_speculative_sampling = chain
    assert rivals.flashinfer_rule("cpu")(*arguments)[0].shape == (2, 4)
    assert all(isinstance(value, torch.Tensor) for value in seen.values())
    sampling.chain_speculative_sampling = lambda p, ids, q: chain(p, ids, q)  # an older version draws its own
    assert rivals.flashinfer_rule("cpu")(*arguments)[0].shape == (2, 4)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert rivals.flashinfer_rule("cpu") is None


@pytest.mark.parametrize("dense", [True, False])
def test_the_eager_rival_emits_the_target_law(rivals, dense):
    """A baseline that is fast because it is wrong would prove nothing."""
    n, p, q = 40_000, torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.manual_seed(0)
    ids = torch.multinomial(q, n, replacement=True)[:, None] if dense else torch.full((n, 1), 1)
    rows = p.log().mul(0.7).expand(n, 2, 4)
    last, count = rivals.token_rule(rows, ids, 0.7, 1.0, q.expand(n, 1, 4) if dense else None)
    first = torch.where(count == 1, ids[:, 0], last)
    assert (count == 1).any() and (count == 0).any()
    for emitted in (first, last[count == 1]):  # the judged token, and the one after full acceptance
        law = emitted.bincount(minlength=4) / len(emitted)
        assert (law - p).abs().max() < 4 * (0.25 / len(emitted)) ** 0.5
    last, count = rivals.token_rule(rows, ids, 0.7, 0.6, q.expand(n, 1, 4) if dense else None)
    assert set(last.tolist()) == {0, 1}
