"""Last launch of ``verify_tree``: one program per request walks its tree, judges the nodes and draws the last token.

A node is known by its row (tree_state.py). What the walk has to remember about nodes lies in a workspace of six numbers
per row. Launches: survey; settle (with filters or rule "typical"); this.
"""

import torch
import triton
import triton.language as tl

from .chain import (
    BAD_DRAFT,
    BAD_VALUE,
    ENTROPY_OF_A_POINT,
    HARD_TARGET,
    NO_CANDIDATE,
    chance,
    coin,
    good_sampling,
    typical_bound,
)
from .draw import draw
from .launch import Matrix, Sampling, describe, launch, on_device, padded
from .philox import LAST, PLAIN
from .proposal import Drafts, read_proposal
from .row import (
    MANY,
    SETTLED,
    Rows,
    argmax,
    entries,
    facts_of,
    log_probability,
    of_request,
    read_facts,
    read_survey,
    unfiltered,
    weight_of,
)
from .tree_state import (
    Tree,
    mass_without_refused,
    own_probability,
    parent_of,
    put,
    refuse,
    token_of,
    weight_left,
)

UNSEEN = tl.constexpr(-1.0)  # marks of a ratio: not computed yet
DEAD = tl.constexpr(-2.0)  # the node takes no part


@triton.jit
def _link(tree, count, columns, max_depth):
    """Checks the tree, and links every present node to its parent and siblings; False if something is wrong."""
    good = count >= 0
    i = count - 1
    while (i >= 0) & good:
        j = tree.root + 1 + i
        token = tl.load(tree.tokens + j - tree.shift)
        present = token != -1
        depth = i * 0
        up = i
        while (up >= 0) & good:
            parent = tl.load(tree.parents + tree.root + 1 + up - tree.shift)
            good = (parent >= -1) & (parent < up) & (depth < max_depth)
            if (parent >= 0) & good:
                present = present & (tl.load(tree.tokens + tree.root + 1 + parent - tree.shift) != -1)
            up = parent
            depth += 1
        good = good & ((present == 0) | ((token >= 0) & (token < columns)))
        if present & good:
            r = parent_of(tree, j)
            first = tl.load(tree.first + r)
            k = first
            while k >= 0:
                good = good & (tl.load(tree.tokens + k - tree.shift) != token)
                k = tl.load(tree.next + k)
            put(tree.next + j, first)
            put(tree.first + r, j)
        i -= 1
    return good


@triton.jit
def _hard(facts):
    return tl.where((facts.nan != 0) | (facts.best == float("inf")), HARD_TARGET, 0)


@triton.jit
def _argmax_of(target, r, G: tl.constexpr):
    """(the row's argmax or -1, its flags)."""
    top, sums = read_survey(target, r.to(tl.int64), G)
    hard = (tl.min(sums, axis=0) < 0.0) | (tl.max(top, axis=0) == float("inf"))
    return argmax(target, r.to(tl.int64), top, G), tl.where(hard, HARD_TARGET, 0)


@triton.jit
def _follow_argmax(target, tree, G: tl.constexpr):
    """The end of the path of argmaxes, and flags."""
    r = tree.root
    flags = r * 0
    going = r >= 0
    while going:
        best, hard = _argmax_of(target, r, G)
        flags = flags | hard
        here = r
        j = tl.load(tree.first + r)
        while j >= 0:
            if token_of(tree, j) == best:
                r = j
            j = tl.load(tree.next + j)
        going = r != here
    return r, flags


@triton.jit
def _token(target, tree, b, t, least, seeds, positions, DENSE: tl.constexpr, G: tl.constexpr):
    """Top-down: the children of a node are tried in order, each against what its siblings left of p."""
    r = tree.root
    flags = r * 0
    total = tl.full([], 0.0, tl.float64)
    going = r >= 0
    while going:
        facts = facts_of(target, r.to(tl.int64), t, G)
        flags = flags | _hard(facts)
        total = facts.total
        below = r * 0 - 1
        j = tl.load(tree.first + r)
        while j >= 0:
            following = tl.load(tree.next + j)
            q = own_probability(tree, j, DENSE, G)
            if q <= 0.0:
                flags = flags | BAD_DRAFT
            elif facts.best == float("-inf"):
                following = r * 0 - 1
            else:
                mass = mass_without_refused(tree, r, j, q, DENSE, G)
                p = weight_left(target, tree, r, token_of(tree, j), facts, t, least, DENSE) / total
                if coin(seeds, positions, b, j - tree.root - 1) * (q / mass) < p:
                    below = j
                    following = r * 0 - 1
                else:
                    left = refuse(target, tree, r, j, total, mass, tl.full([], 1.0, tl.float64), facts, t, least,
                                  DENSE)  # fmt: skip
                    total = tl.where(left > 0.0, left, total)
            j = following
        going = below >= 0
        r = tl.where(going, below, r)
    return r, flags


@triton.jit
def _traversal(target, tree, count, b, t, least, seeds, positions, open_, totals, ratios, DENSE: tl.constexpr,
               G: tl.constexpr):  # fmt: skip
    """Bottom-up: leaves in depth-first order; a refused leaf changes its parent's p and r."""
    one = tl.full([], 1.0, tl.float64)
    flags = tree.root * 0
    for i in range(count + 1):
        j = tree.root + i
        takes_part = i == 0
        if i > 0:
            if tl.load(tree.tokens + j - tree.shift) >= 0:
                r = parent_of(tree, j)
                if tl.load(ratios + r) != DEAD:
                    if own_probability(tree, j, DENSE, G) <= 0.0:
                        flags = flags | BAD_DRAFT
                    else:
                        takes_part = tl.load(totals + r) > 0.0
        if takes_part:
            facts = facts_of(target, j.to(tl.int64), t, G)
            flags = flags | _hard(facts)
            put(ratios + j, tl.where(i == 0, one, UNSEEN))
            put(totals + j, tl.where(facts.best > float("-inf"), facts.total, 0.0))
            put(open_ + j, tl.load(tree.first + j))

    r = tree.root
    going = r >= 0
    while going:
        j = tl.load(open_ + r)
        while (j >= 0) & (tl.load(ratios + tl.maximum(j, tree.root)) == DEAD):
            j = tl.load(tree.next + j)
        down = j >= 0
        if down == 0:  # a leaf
            going = r != tree.root
            if going:
                going = coin(seeds, positions, b, r - tree.root - 1) >= tl.load(ratios + r)
                if going:  # is refused
                    j = r
                    r = parent_of(tree, r)
        if going:
            ratio = tl.load(ratios + r)
            if (down == 0) | (tl.load(ratios + j) == UNSEEN):
                total = tl.load(totals + r)
                facts = facts_of(target, r.to(tl.int64), t, G)
                q = own_probability(tree, j, DENSE, G)
                mass = mass_without_refused(tree, r, j, q, DENSE, G)
                if down:
                    p = weight_left(target, tree, r, token_of(tree, j), facts, t, least, DENSE) / total
                    put(ratios + j, tl.minimum(ratio * p / (q / mass), 1.0))
                else:
                    left = refuse(target, tree, r, j, total, mass, ratio, facts, t, least, DENSE)
                    put(totals + r, tl.where(left > 0.0, left, total))
                    put(ratios + r, chance(ratio * left / total, ratio))
            put(open_ + r, tl.where(down, j, tl.load(tree.next + j)))
            r = tl.where(down, j, r)
    return r, flags


@triton.jit
def _typical(target, tree, count, t, least, eps, delta, depths, scores, G: tl.constexpr):
    """The end of the longest path of nodes with p(x) > min(eps, delta*exp(-H)); ties by sum log p, the lowest node."""
    flags = tree.root * 0
    longest = tree.root * 0
    highest = tl.full([], 0.0, tl.float64)
    end = tree.root
    for i in range(count + 1):
        j = tree.root + i
        accepted = i == 0
        depth = i * 0
        score = tl.full([], 0.0, tl.float64)
        if i > 0:
            token = tl.load(tree.tokens + j - tree.shift).to(tl.int32)
            r = parent_of(tree, j)
            depth = tl.load(depths + r)
            if (token >= 0) & (depth >= 0):
                p = tl.full([], 0.0, tl.float64)
                entropy = tl.full([], ENTROPY_OF_A_POINT, tl.float64)
                if t == 0.0:
                    best, _ignored = _argmax_of(target, r, G)
                    p = (best == token).to(tl.float64)
                elif target.settled is not None:
                    facts = facts_of(target, r.to(tl.int64), t, G)
                    if facts.best > float("-inf"):
                        p = weight_of(target, r.to(tl.int64), token, t, facts, least) / facts.total
                    entropy = tl.load(target.settled + r.to(tl.int64) * SETTLED + 5)
                accepted = (p > 0.0) & (p > typical_bound(eps, delta, entropy))
                if accepted:
                    score = tl.load(scores + r) + tl.log(p)
            depth += 1
        if accepted:
            put(depths + j, depth)
            put(scores + j, score)
            if t == 0.0:
                _, hard = _argmax_of(target, j, G)
                flags = flags | hard
            elif target.settled is not None:
                facts = facts_of(target, j.to(tl.int64), t, G)
                flags = flags | _hard(facts)
            if (depth > longest) | ((depth == longest) & (depth > 0) & (score > highest)):
                longest = depth
                highest = score
                end = j
    return end, flags


@triton.jit
def _threshold(target, tree, t, least, theta, DENSE: tl.constexpr, G: tl.constexpr):
    """Down to the child of largest target logit as long as its P_target is more than theta times the best P_draft."""
    temperature = tl.where(t == 0.0, 1.0, t)
    r = tree.root
    flags = r * 0
    going = r >= 0
    while going:
        here = r.to(tl.int64)
        facts = facts_of(target, here, temperature, G)
        flags = flags | _hard(facts)
        chosen = r * 0 - 1
        token = r * 0 + MANY
        logit = tl.full([], float("-inf"), tl.float32)
        best = tl.full([], 0.0, tl.float64)
        j = tl.load(tree.first + r)
        while j >= 0:
            q = own_probability(tree, j, DENSE, G)
            if q <= 0.0:
                flags = flags | BAD_DRAFT
            else:
                mine = token_of(tree, j)
                x = entries(target.data + here * target.stride, mine, mine >= 0)
                # All logits of a row with a +inf are -inf but its first +inf.
                if facts.best == float("inf"):
                    x = tl.where(mine == facts.last, x, float("-inf"))
                if (x > logit) | ((x == logit) & (mine < token)):
                    chosen = j
                    token = mine
                    logit = x
                best = tl.maximum(best, q)
            j = tl.load(tree.next + j)
        going = chosen >= 0
        if going:
            top, sums = read_survey(target, here, G)
            raw = unfiltered(target, here, top, sums, temperature, G)
            p = weight_of(target, here, token, temperature, raw, -1.0) / raw.total
            supported = weight_of(target, here, token, temperature, facts, least) > 0.0
            going = supported & (facts.best > float("-inf")) & (p / best > tl.full([], theta, tl.float64))
        r = tl.where(going, chosen, r)
    return r, flags


@triton.jit(do_not_specialize=["nodes", "max_depth", "rows_in_all"])
def verify_tree_kernel(
    target, target_stride, columns, target_stats, target_groups, target_settled,
    drafts, draft_stride, draft_columns, draft_stats, draft_groups, draft_settled,
    tree_tokens, parents, cu_nodes, nodes, max_depth, links, state, rows_in_all,
    temperature, temperatures, top_p, top_ps, min_p, min_ps, theta, thetas, eps, delta, seeds, positions,
    path, tokens, num_accepted, logprobs, all_flags,
    RULE: tl.constexpr, FIELDS: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start = tl.load(cu_nodes + b)
    count = tl.load(cu_nodes + b + 1) - start
    t = of_request(temperature, temperatures, b)
    least = of_request(min_p, min_ps, b)
    bound = of_request(theta, thetas, b)
    good = (start >= 0) & (count >= 0) & (start + count <= nodes)
    good = good & ((b > 0) | (start == 0)) & ((b + 1 < tl.num_programs(0)) | (start + count == nodes))
    good = good & good_sampling(t, of_request(top_p, top_ps, b), least) & (bound == bound)
    count = tl.where(good, count, -1)
    root = tl.where(good, start + b, b)

    RANDOM: tl.constexpr = seeds is not None
    DENSE: tl.constexpr = drafts is not None
    rows = Rows(target, target_stride, columns, target_stats, FIELDS, target_groups, target_settled)
    ratios = state + rows_in_all
    totals = state + 2 * rows_in_all
    q = Rows(drafts, draft_stride, draft_columns, draft_stats, 2, draft_groups, draft_settled)
    tree = Tree(tree_tokens, parents, root, b + 1, links, links + rows_in_all, state, q)
    for at in range(0, count + 1, 64):
        place = at + tl.arange(0, 64)
        mine = root + place
        tl.store(links + mine, -1, mask=place <= count)
        tl.store(links + 2 * rows_in_all + mine, -1, mask=place <= count)
        tl.store(state + mine, -1.0, mask=place <= count)
        tl.store(ratios + mine, DEAD, mask=place <= count)
    tl.debug_barrier()
    good = good & _link(tree, count, columns, max_depth)

    end = root
    flags = b * 0
    if good == 0:
        flags = b * 0 + BAD_VALUE
    elif RULE == "threshold":
        end, flags = _threshold(rows, tree, t, least, bound, DENSE, G)
    elif RULE == "typical":
        end, flags = _typical(rows, tree, count, t, least, eps, delta, links + 2 * rows_in_all, ratios, G)
    elif t == 0.0:
        end, flags = _follow_argmax(rows, tree, G)
    elif RANDOM:
        if RULE == "token":
            end, flags = _token(rows, tree, b, t, least, seeds, positions, DENSE, G)
        else:
            end, flags = _traversal(rows, tree, count, b, t, least, seeds, positions, links + 2 * rows_in_all, totals,
                                    ratios, DENSE, G)  # fmt: skip

    accepted = b * 0
    j = end
    while j != root:
        accepted += 1
        j = parent_of(tree, j)
    token = b * 0 - 1
    r = end.to(tl.int64)
    if good:
        if t == 0.0:
            token, _ignored = _argmax_of(rows, end, G)
        elif RANDOM:
            facts, mass = read_facts(rows, r, t, least, G)
            if facts.best > float("-inf"):
                none = Drafts(Rows(None, 0, 0, None, 2, 0, None), None, None, 0)
                nothing = read_proposal(none, r, token, t, least, False, False, 1)
                purpose = tl.where(tl.load(tree.first + root) < 0, PLAIN, accepted + LAST)
                token = draw(rows, r, facts, mass, t, least, tl.full([], 1.0, tl.float64), token, tree, nothing,
                             tl.load(seeds + b), tl.load(positions + b), purpose, DENSE, False, True,
                             G)  # fmt: skip
        if token < 0:
            flags = flags | NO_CANDIDATE

    place = tl.arange(0, WIDTH)
    depth = b.to(tl.int64) * max_depth
    tl.store(path + depth + place, -1, mask=place < max_depth)
    last = tl.where(place == accepted, token.to(tl.int64), -1)
    tl.store(tokens + depth + b + place, last, mask=place <= max_depth)
    if logprobs is not None:
        tl.store(logprobs + depth + b + place, float("nan"), mask=place <= max_depth)
    tl.debug_barrier()
    j = end
    i = accepted
    emitted = token
    while i >= 0:
        if logprobs is not None:
            if emitted >= 0:
                tl.store(logprobs + depth + b + i, log_probability(rows, j.to(tl.int64), emitted, G))
        if i > 0:
            emitted = token_of(tree, j)
            tl.store(tokens + depth + b + i - 1, emitted.to(tl.int64))
            tl.store(path + depth + i - 1, j - root - 1)
            j = parent_of(tree, j)
        i -= 1
    tl.store(num_accepted + b, accepted)
    tl.store(all_flags + b, flags)


def verify_tree(
    target_logits, tree_tokens, parents, cu_nodes, draft_rows, temperature, top_k, top_p, min_p, seed, position, rule,
    theta, typical, path, tokens, num_accepted, logprobs, flags,
):  # fmt: skip
    requests, max_depth = path.shape
    if requests == 0:
        return
    sampling = Sampling(temperature, top_k, top_p, min_p, seed, position, rule)
    target = Matrix(target_logits, sampling.settled, logprobs is not None)
    draft = None if draft_rows is None or not sampling.reads_drafts else Matrix(draft_rows, False)
    rows = len(target_logits)
    links = target_logits.new_empty((3, rows), dtype=torch.int32)  # first child, next sibling, and one of the rule
    state = target_logits.new_empty((3, rows), dtype=torch.float64)  # factor, r or score, total
    with on_device(target_logits):
        describe(target, draft, True, None, cu_nodes, requests, sampling)
        launch(
            verify_tree_kernel, (requests,), target.threads,
            *target.arguments, *Matrix.arguments_of(draft), tree_tokens, parents, cu_nodes, len(tree_tokens), max_depth,
            links, state, rows,
            *sampling.temperature, *sampling.top_p, *sampling.min_p, *sampling.theta(theta), *typical, seed, position,
            path, tokens, num_accepted, logprobs, flags,
            RULE=rule, FIELDS=target.fields, G=target.padded, WIDTH=padded(max_depth + 1),
        )  # fmt: skip
