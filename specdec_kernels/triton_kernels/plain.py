"""Last launch of ``sample``: one program per row draws its token. Before it: survey; settle if there are filters."""

import triton
import triton.language as tl

from .chain import log_probability, read_facts
from .draw import draw
from .launch import Rows, filtered, launch, on_device, per_request, survey_and_settle, warps
from .row import argmax, read_survey
from .settle import of_request


@triton.jit
def sample_kernel(
    logits, stride, columns, stats, groups, settled,
    temperature, temperatures, top_p, top_ps, min_p, min_ps, seeds, positions, stream, index, indices,
    tokens, logprobs,
    G: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    t = of_request(temperature, temperatures, b)
    p = of_request(top_p, top_ps, b)
    least = of_request(min_p, min_ps, b)
    i = of_request(index, indices, b)
    row = logits + b.to(tl.int64) * stride
    here = stats + b.to(tl.int64) * (3 if logprobs is not None else 2) * groups
    token = tl.full([], -1, tl.int32)
    nothing = token  # is subtracted from p
    if t == 0.0:
        top, _ = read_survey(here, groups, G)
        if tl.max(top, axis=0) > float("-inf"):
            token = argmax(row, columns, top, G)
    elif seeds is not None:
        if (t > 0.0) & (t < float("inf")) & (p >= 0.0) & (least <= 1.0):  # false for NaN
            _, mass, best, total, cut, last, _ = read_facts(row, columns, here, groups, settled, b.to(tl.int64), t, G)
            if best > float("-inf"):
                token = draw(
                    row, columns, mass, t, best, cut, last, least, tl.full([], 1.0, tl.float64), nothing, nothing >= 0,
                    row, columns, None, 0, best, total, cut, last,
                    tl.load(seeds + b), tl.load(positions + b), (stream << 24) | i,
                    False, False, G,
                )  # fmt: skip
    tl.store(tokens + b, token.to(tl.int64))
    if logprobs is not None:
        if token >= 0:
            tl.store(logprobs + b, log_probability(row, columns, token, here, groups, G))
        else:
            tl.store(logprobs + b, float("nan"))


def sample(logits, temperature, top_k, top_p, min_p, seed, position, stream, index, tokens, logprobs):
    if len(tokens) == 0:
        return
    filters = filtered(top_k, top_p, min_p) and seed is not None
    rows = Rows(logits, filters, logprobs is not None)
    with on_device(logits):
        survey_and_settle(
            rows, None, None, True, None, 0, len(tokens), 1, temperature, top_k, top_p, min_p, logprobs is not None
        )
        launch(
            sample_kernel, (len(tokens),),
            rows.rows, rows.stride, rows.columns, rows.stats, rows.groups, rows.settled,
            *per_request(temperature), *per_request(top_p), *per_request(min_p), seed, position, stream,
            *per_request(index, 0), tokens, logprobs,
            G=rows.padded, warps=warps(rows),
        )  # fmt: skip
