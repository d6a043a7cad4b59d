"""Last launch of ``sample``: one program per row draws its token. Before it: survey; settle if there are filters."""

import triton
import triton.language as tl

from .chain import good_sampling
from .draw import draw
from .launch import Matrix, Sampling, describe, launch, on_device, per_request
from .proposal import Drafts, read_proposal
from .row import Rows, argmax, log_probability, of_request, read_facts, read_survey


@triton.jit(do_not_specialize=["stream", "index"])
def sample_kernel(
    logits, stride, columns, stats, groups, settled,
    temperature, temperatures, top_p, top_ps, min_p, min_ps, seeds, positions, stream, index, indices,
    tokens, logprobs,
    FIELDS: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    t = of_request(temperature, temperatures, b)
    least = of_request(min_p, min_ps, b)
    i = of_request(index, indices, b)
    rows = Rows(logits, stride, columns, stats, FIELDS, groups, settled)
    r = b.to(tl.int64)
    token = b * 0 - 1
    if t == 0.0:
        top, _ = read_survey(rows, r, G)
        token = argmax(rows, r, top, G)
    elif seeds is not None:
        if good_sampling(t, of_request(top_p, top_ps, b), least):
            facts, mass = read_facts(rows, r, t, least, G)
            if facts.best > float("-inf"):
                none = Drafts(Rows(None, 0, 0, None, 2, 0, None), None, None, 0)
                nothing = read_proposal(none, r, token, t, least, False, False, 1)
                token = draw(rows, r, facts, mass, t, least, tl.full([], 0.0, tl.float64), token, none, nothing,
                             tl.load(seeds + b), tl.load(positions + b), (stream << 24) | i, False, False,
                             False, G)  # fmt: skip
    tl.store(tokens + b, token.to(tl.int64))
    if logprobs is not None:
        logprob = tl.full([], float("nan"), tl.float32)
        if token >= 0:
            logprob = log_probability(rows, r, token, G)
        tl.store(logprobs + b, logprob)


def sample(logits, temperature, top_k, top_p, min_p, seed, position, stream, index, tokens, logprobs):
    requests = len(tokens)
    if requests == 0:
        return
    sampling = Sampling(temperature, top_k, top_p, min_p, seed, position)
    rows = Matrix(logits, sampling.settled, logprobs is not None)
    with on_device(logits):
        describe(rows, None, False, None, None, requests, sampling)
        launch(
            sample_kernel, (requests,), rows.threads,
            *rows.arguments, *sampling.temperature, *sampling.top_p, *sampling.min_p, seed, position,
            stream, *per_request(index, 0), tokens, logprobs, FIELDS=rows.fields, G=rows.padded,
        )  # fmt: skip
