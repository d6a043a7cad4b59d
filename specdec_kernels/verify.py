"""Verification of drafted tokens: raw logits in, tokens out."""

import itertools
from typing import NamedTuple

import torch

from . import library, native, parameters, registry, validate

RULES = ("token", "block", "typical", "threshold")
_INT32, _INTS = (torch.int32,), (torch.int32, torch.int64)


class Verdict(NamedTuple):
    """What one round emits for each of B requests."""

    tokens: torch.Tensor  # [B, W] int64: the accepted drafts and one more token, then -1
    num_accepted: torch.Tensor  # [B] int32
    logprobs: torch.Tensor | None  # [B, W] f32: log-softmax of the raw target row at the emitted id, NaN beyond
    flags: torch.Tensor  # [B] int32: 1 NaN or +inf in a target row, 2 last row without candidate, 4 bad value, 8 bad q


def verify(
    target_logits,
    draft_tokens,
    cu_drafts,
    *,
    draft_logits=None,
    draft_probs=None,
    draft_ids=None,
    draft_kind=None,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=None,
    position=None,
    max_drafts=None,
    rule="token",
    theta=None,
    typical=(0.09, 0.3),
    return_logprobs=False,
):
    """Judges the drafts of B requests against the target model and draws each request's next token.

    A greedy request (temperature 0) accepts a draft iff it is its row's argmax. Otherwise, by ``rule``:

    "token" (Leviathan et al. 2211.17192, Chen et al. 2302.01318): draft x of row p is accepted iff u*q(x) < p(x); at
    the first refusal the next token is drawn from max(p - q, 0), after full acceptance from the bonus row's p. The law
    of what is emitted is p.

    "block" (Sun et al. 2403.10444): the same law, more accepted drafts. r_0 = 1, r_i = min(r_{i-1} p_i(x_i)/q_i(x_i),
    1), S_i = sum max(r_i p_{i+1} - q_{i+1}, 0), h_i = S_i/(S_i + 1 - r_i), at the block's end h = r. The longest prefix
    whose coin u_i is below h_i is accepted; the next token is drawn from max(r p - q, 0) behind it. The block ends
    before a -1, an unusable draft row, or a target row without candidate.

    "typical" (Medusa 2401.10774; lossy): accepted iff p(x) > min(eps, delta*exp(-H)), H = -sum p log(p + 1e-5); the
    next token is drawn from p. Draft rows are not read.

    "threshold" (lossy): accepted iff x passes the filters and P_target(x)/P_draft(x) > theta, both softmax(l/T) before
    filters, T = 1 and filters at T = 1 for greedy requests; P_draft = 1 for a point mass.

    Args (M = N + B rows; request i owns rows ``cu_drafts[i] + i`` to ``cu_drafts[i + 1] + i``, its bonus row last):
        target_logits: [M, V] f32, f16 or bf16, raw; any distance between rows. Never modified.
        draft_tokens: [N] int32 or int64, target ids. -1 = no proposal: it and what follows in the request is ignored,
            and the token after the accepted prefix is drawn from that row's p.
        cu_drafts: [B + 1] int32, ascending from 0 to N. A request may have no drafts: plain sampling.
        draft_logits: [N, V] raw; the request's temperature and filters apply to them as well. Or:
        draft_probs: [N, V] exactly as sampled from; used as they are. Or neither: every draft is a point mass.
        draft_ids: [Vd] int32 ascending: the draft rows are [N, Vd], over these target ids.
        draft_kind: [N] bool, True = this draft is a point mass and its row is not read.
        temperature, top_k, top_p, min_p: a number, or a tensor [B]; rounded to f32. With w = exp((l - max)/T) a row
            keeps the first ``top_k`` ids in the order (logit descending, id ascending), of these the shortest prefix
            with at least ``top_p`` of their mass, of these w >= ``min_p``. Off: top_k <= 0 or >= V, top_p >= 1,
            min_p <= 0.
        seed, position: [B] int64; position = absolute position of the first token that this call emits. They name the
            round's random numbers and are needed unless ``temperature`` is the number 0.
        max_drafts: width W - 1 of the output; None = the longest request (CPU only, and not under torch.compile).
        rule: see above. theta: of "threshold", a number or a tensor [B]; no default. typical: its (eps, delta).
        return_logprobs: whether to fill ``Verdict.logprobs``.

    Returns a :class:`Verdict`. NaN and -inf entries have p = 0; a +inf makes its row a point mass on the first one.
    An unusable draft row (a NaN; an infinite or negative probability; q(x) = 0) refuses its draft, and p is drawn.
    Rows after the first refusal are never read.

    Raises ValueError or TypeError that names the argument; on a GPU bad values set flag 4 instead.
    """
    if torch.compiler.is_compiling():
        tokens, num_accepted, logprobs, flags = library.call(
            "verify", target_logits, draft_tokens, cu_drafts, draft_logits=draft_logits, draft_probs=draft_probs,
            draft_ids=draft_ids, draft_kind=draft_kind, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            seed=seed, position=position, max_drafts=max_drafts, rule=rule, theta=theta,
            typical=typical, return_logprobs=return_logprobs,
        )  # fmt: skip
        return Verdict(tokens, num_accepted, logprobs if return_logprobs else None, flags)
    validate.tensor("target_logits", target_logits, validate.FLOATS, 2)
    validate.rows("target_logits", target_logits)
    device = target_logits.device
    rows, vocabulary = target_logits.shape
    validate.tensor("draft_tokens", draft_tokens, _INTS, 1, device)
    validate.tensor("cu_drafts", cu_drafts, _INT32, 1, device)
    drafts, requests = draft_tokens.shape[0], cu_drafts.shape[0] - 1
    if requests < 0:
        raise ValueError("cu_drafts: expected shape [B + 1], got [0]")
    if rows != drafts + requests:
        raise ValueError(
            f"target_logits: expected N + B = {drafts} + {requests} rows, got shape {list(target_logits.shape)}"
        )
    if vocabulary == 0:
        raise ValueError(f"target_logits: expected at least one id, got shape {list(target_logits.shape)}")
    theta, typical = parameters.rule(rule, RULES, theta, typical, requests, device)
    draft_rows, draft_ids, draft_kind = _draft_side(
        draft_logits, draft_probs, draft_ids, draft_kind, drafts, vocabulary, device
    )
    temperature, top_k, top_p, min_p, seed, position = parameters.sampling(
        temperature, top_k, top_p, min_p, seed, position, requests, device
    )
    draft_tokens, cu_drafts = draft_tokens.long().contiguous(), cu_drafts.contiguous()
    longest = _longest(draft_tokens, cu_drafts, drafts, requests, vocabulary) if target_logits.is_cpu else None
    width = 1 + _max_drafts(max_drafts, longest)

    # Made like a tensor that has their dtype: naming one would cost as much again.
    tokens = draft_tokens.new_empty(requests, width)
    num_accepted, flags = cu_drafts.new_empty(requests), cu_drafts.new_empty(requests)
    logprobs = target_logits.new_empty(requests, width, dtype=torch.float32) if return_logprobs else None
    registry.call(
        "verify",
        validate.device_type(target_logits),
        target_logits,
        draft_tokens,
        cu_drafts,
        draft_rows,
        draft_logits is not None,
        draft_ids,
        draft_kind,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        rule,
        theta,
        typical,
        tokens,
        num_accepted,
        logprobs,
        flags,
    )
    return Verdict(tokens, num_accepted, logprobs, flags)


def _draft_side(draft_logits, draft_probs, draft_ids, draft_kind, drafts, vocabulary, device):
    """The checked draft rows, ids and kinds; all None if every draft is a point mass."""
    if draft_logits is not None and draft_probs is not None:
        raise ValueError("draft_probs: expected None beside draft_logits (give one form), got both")
    name, draft_rows = ("draft_logits", draft_logits) if draft_probs is None else ("draft_probs", draft_probs)
    if draft_kind is not None:
        draft_kind = validate.vector("draft_kind", draft_kind, (torch.bool,), drafts, device).contiguous()
    if draft_rows is None:
        if draft_ids is not None:
            raise ValueError("draft_ids: expected draft_logits or draft_probs beside them, got neither")
        if draft_kind is not None and draft_kind.is_cpu and not bool(draft_kind.all()):
            raise ValueError("draft_kind: expected draft_logits or draft_probs for a False, got neither")
        return None, None, None
    validate.tensor(name, draft_rows, validate.FLOATS, 2, device)
    validate.rows(name, draft_rows)
    if draft_ids is not None:
        validate.tensor("draft_ids", draft_ids, (torch.int32,), 1, device)
        if draft_ids.shape[0] == 0:
            raise ValueError("draft_ids: expected at least one id, got none")
        if draft_ids.is_cpu and not validate.ascending(draft_ids, vocabulary):
            raise ValueError(f"draft_ids: expected strictly ascending ids in [0, {vocabulary}), got {draft_ids}")
        draft_ids = draft_ids.contiguous()
    validate.shape(name, draft_rows, (drafts, vocabulary if draft_ids is None else draft_ids.shape[0]))
    return draft_rows, draft_ids, draft_kind


def _longest(draft_tokens, cu_drafts, drafts, requests, vocabulary):
    """The longest request's number of drafts; refuses bounds and ids out of range."""
    if native.cpu is not None:
        longest = native.cpu.longest_chain(cu_drafts.data_ptr(), requests, draft_tokens.data_ptr(), drafts, vocabulary)
        if longest >= 0:
            return longest
    return _check_drafts(draft_tokens.tolist(), cu_drafts.tolist(), vocabulary)  # says what is wrong


def _check_drafts(ids, bounds, vocabulary):
    longest, previous = 0, bounds[0]
    for bound in bounds:
        longest = max(longest, bound - previous)
        if bound < previous or bounds[0] != 0:
            break
        previous = bound
    else:
        if previous == len(ids):
            _check_ids(ids, bounds, vocabulary)
            return longest
    raise ValueError(f"cu_drafts: expected values ascending from 0 to N = {len(ids)}, got {bounds}")


def _check_ids(ids, bounds, vocabulary):
    for start, stop in itertools.pairwise(bounds):
        for i in ids[start:stop]:
            if i == -1:
                break  # the rest of this request is ignored
            if not 0 <= i < vocabulary:
                raise ValueError(f"draft_tokens: expected -1 or ids in [0, {vocabulary}), got {i}")


def _max_drafts(value, longest):
    if value is None:
        if longest is None:
            raise ValueError("max_drafts: expected an integer when the tensors are not on the CPU, got None")
        return longest
    value = validate.integer("max_drafts", value)
    if value < (longest or 0):
        raise ValueError(f"max_drafts: expected at least the longest request's {longest or 0} drafts, got {value}")
    return value
