"""A whole process, as a user starts it: seconds until the first byte of text, and the peak resident memory.

    python bench/bench_cold_start.py [--runs N] [--quick] [--json]

Runs ``python -m specloop generate`` with the file cache warm (one run that is not counted comes first). The peak is the
kernel's own count for the finished process (ru_maxrss): interpreter, torch, tokenizer and weights together.

Also what the first round after loading takes, prompt aside, against the median of later ones: loading warms up, so the
ratio should be 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PROMPT = "Write one sentence about the sea."


def once(dtype):
    """(seconds to the first byte on stdout, seconds in all, peak resident bytes) of one process."""
    command = [sys.executable, "-m", "specloop", "generate", PROMPT, "--dtype", dtype, "--max-new-tokens", "64"]
    start = time.perf_counter()
    # Elsewhere than in the checkout, whose specdec_kernels folder would hide the installed package.
    elsewhere = tempfile.gettempdir()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=elsewhere)
    first = os.read(process.stdout.fileno(), 1)
    to_first = time.perf_counter() - start
    process.stdout.read()
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not first or process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {errors.decode(errors='replace')}")
    return to_first, time.perf_counter() - start, usage.ru_maxrss * 1024


ROUNDS = """
import json, statistics, sys, time
import specloop
pair = specloop.load("smollm2", dtype=sys.argv[1], draft="none")
pair.ready()
stream = pair.stream(sys.argv[2], max_new_tokens=32)
times = [time.perf_counter()]
for _ in stream:
    times.append(time.perf_counter())
rounds = [b - a for a, b in zip(times, times[1:])]
first = rounds[0] - stream.result.stats.timing.prefill_seconds
print(json.dumps([first, statistics.median(rounds[2:])]))
"""


def rounds(dtype):
    """Seconds of the first round of a process, and the median of its later ones."""
    command = [sys.executable, "-c", ROUNDS, dtype, PROMPT]
    return json.loads(subprocess.run(command, check=True, capture_output=True, cwd=tempfile.gettempdir()).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dtype", default="int8")
    options = parser.parse_args()
    once(options.dtype)
    runs = [once(options.dtype) for _ in range(2 if options.quick else options.runs)]
    first_round, later_round = (statistics.median(t) for t in zip(*(rounds(options.dtype) for _ in runs), strict=True))
    first, total, peak = (statistics.median(values) for values in zip(*runs, strict=True))
    report = {
        "name": f"cold start {options.dtype}",
        "first_token_s": first,
        "total_s": total,
        "peak_mb": peak / 1e6,
        "peak_mib": peak / 2**20,
        "first_round_ms": first_round * 1e3,
        "later_round_ms": later_round * 1e3,
        "runs": len(runs),
        "load_average": os.getloadavg()[0],
    }
    if options.json:
        print(json.dumps(report))
    else:
        print(f"first text after {first:.2f} s (slowest {max(run[0] for run in runs):.2f} s), all after {total:.2f} s")
        print(f"first round {first_round * 1e3:.1f} ms, later ones {later_round * 1e3:.1f} ms")
        print(f"peak resident {peak / 1e6:.0f} MB ({peak / 2**20:.0f} MiB)")
        print(f"median of {len(runs)} runs; load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
