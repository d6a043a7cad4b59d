"""verify against eager PyTorch written well and against a plain read of the same rows; caches cold.

    python bench/bench_verify.py [--json] [--isa avx2] [--pairs 15] [--vocabulary 49152]

One call judges K = 4 drafts for B = 1 or 8 requests. "all rows": every draft is accepted, so all 5 rows of a request
count; "early exit": the first draft is refused, so 1 row counts and the rest is never read. Logits are Gaussian with
one likely id per row, in buffers that together exceed the last-level cache and take turns. A ratio inside the A/A
interval means nothing.
"""

import argparse
import itertools
import os
import statistics
import time

import torch
from ab import aa, as_json, compare

from specdec_kernels import native, verify

DRAFTS, CACHE = 4, 64 << 20  # bytes of logits to rotate through


def eager_greedy(rows, drafts):
    """[B, K + 1, V] and [B, K] -> ids [B, K + 1], number accepted [B]."""
    best = rows.argmax(-1)
    return best, (best[:, :-1] == drafts).long().cumprod(1).sum(1)


def eager_random(rows, drafts, temperature, top_p):
    """The token rule for point masses: softmax, nucleus by sorting, coins, and one draw per request."""
    p = torch.softmax(rows.float() / temperature, -1)
    if top_p < 1:
        ordered, ids = p.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        p = torch.zeros_like(p).scatter_(-1, ids, ordered)
        p /= p.sum(-1, keepdim=True)
    accepted = torch.rand(drafts.shape) < p[:, :-1].gather(-1, drafts[..., None])[..., 0]
    count = accepted.long().cumprod(1).sum(1)
    which = torch.arange(len(p))
    last = p[which, count]
    refused = count < drafts.shape[1]
    last[which[refused], drafts[refused, count[refused]]] = 0
    return torch.multinomial(last, 1)[:, 0], count


class Inputs:
    """Copies of one call's rows that take turns, so that no row is in the cache when its turn comes."""

    def __init__(self, requests, vocabulary, dtype, accept):
        gen = torch.Generator().manual_seed(0)
        rows = torch.randn(requests, DRAFTS + 1, vocabulary, generator=gen) * 2.5
        likely = torch.randint(0, vocabulary, (requests, DRAFTS + 1), generator=gen)
        rows.scatter_(-1, likely[..., None], rows.logsumexp(-1, keepdim=True) + 9)
        rows = rows.to(dtype)
        copies = max(2, -(-CACHE // (rows.numel() * rows.element_size())))
        self.rows = [rows.clone() for _ in range(copies)]
        self.flat = [r.view(-1, vocabulary) for r in self.rows]
        self.drafts = likely[:, :-1] if accept else (likely[:, :-1] + 1) % vocabulary
        self.tokens = self.drafts.reshape(-1).clone()
        self.cu = torch.arange(0, DRAFTS * requests + 1, DRAFTS, dtype=torch.int32)
        self.seed, self.position = torch.arange(requests), torch.full((requests,), 7)
        self.read_rows = (DRAFTS + 1 if accept else 1, rows[0, 0].numel() * rows.element_size())
        self.turn = itertools.cycle(range(copies))

    def ours(self, **options):
        keys = {} if options.get("temperature") == 0 else {"seed": self.seed, "position": self.position}
        return lambda: verify(self.flat[next(self.turn)], self.tokens, self.cu, **options, **keys)

    def eager(self, temperature, top_p=1.0):
        if temperature == 0:
            return lambda: eager_greedy(self.rows[next(self.turn)], self.drafts)
        return lambda: eager_random(self.rows[next(self.turn)], self.drafts, temperature, top_p)

    def read(self):
        """Reads the rows that count, with the same threads."""
        (count, size), threads = self.read_rows, native.threads()

        def run():
            for request in self.rows[next(self.turn)]:
                native.cpu.read_bytes(request.data_ptr(), count * size, threads)

        return run


MODES = {
    "greedy": {"temperature": 0},
    "T=0.7": {"temperature": 0.7},
    "T=1 top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def bench_modes(options, report):
    for requests, dtype, accept in itertools.product((1, 8), (torch.float32, torch.bfloat16), (True, False)):
        inputs = Inputs(requests, options.vocabulary, dtype, accept)
        expected = DRAFTS if accept else 0
        for mode, parameters in MODES.items():
            ours = inputs.ours(**parameters)
            assert (ours().num_accepted == expected).all()
            name = f"B={requests} {str(dtype)[6:]} {'all rows' if accept else 'early exit'} {mode}"
            report(f"{name} A/A", aa(ours, pairs=options.pairs))
            count, size = inputs.read_rows
            against = compare(ours, inputs.read(), pairs=options.pairs)
            gbps = requests * count * size / against.a_seconds / 1e9
            report(f"{name} / plain read", against, gbps=gbps)
            pairs = max(3, options.pairs // 3)
            report(f"{name} / eager", compare(ours, inputs.eager(**parameters), pairs=pairs))


def bench_overhead():
    rows, tokens, cu = torch.randn(5, 16), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 4], dtype=torch.int32)
    keys = {"seed": torch.tensor([1]), "position": torch.tensor([5])}
    for name, parameters in (("greedy", {"temperature": 0}), ("random", keys)):
        seconds = []
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(20):
                verify(rows, tokens, cu, **parameters)
            seconds.append((time.perf_counter() - start) / 20)
        print(f"call overhead, {name}: {statistics.median(seconds) * 1e6:.1f} us (min {min(seconds) * 1e6:.1f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=49152)
    options = parser.parse_args()
    if options.isa and not native.cpu.set_isa(options.isa):
        parser.error(f"this machine can't run {options.isa}")
    print(
        f"# isa {native.cpu.isa()}, {native.threads()} threads, load {os.getloadavg()[0]:.1f}, V {options.vocabulary}"
    )

    def report(name, result, **extra):
        if options.json:
            print(as_json(name, result, isa=native.cpu.isa(), **extra), flush=True)
            return
        low, high = result.interval
        more = "".join(f"  {key} {value:.3g}" for key, value in extra.items())
        print(
            f"{name:52s} {result.ratio:.3f}x [{low:.3f}, {high:.3f}]  {result.a_seconds * 1e6:.0f} us{more}", flush=True
        )

    bench_modes(options, report)
    bench_overhead()


if __name__ == "__main__":
    main()
