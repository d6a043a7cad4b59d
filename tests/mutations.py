"""Runs of mutated files, for the fuzzers."""

import json
import random
import resource
import sys
import time


def run(seed, count, path, mutated, examine):
    """Examines ``count`` files with the bytes ``mutated(rng)`` and prints what came of it as JSON.

    A mutation is a function of the seed and its number, which is told when ``examine(path)`` raises what it should not.
    """
    reasons, slowest, before = {}, 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        path.write_bytes(mutated(random.Random(f"{seed} {number}")))
        start = time.process_time()
        try:
            what = examine(path)
        except BaseException:
            print(f"mutation {number} of seed {seed}", file=sys.stderr)
            raise
        slowest = max(slowest, time.process_time() - start)
        reasons[what] = reasons.get(what, 0) + 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"reasons": reasons, "slowest_s": slowest, "grown_kb": grown}))
