"""Random batches of requests for property tests, that can be judged whole, one by one, in another order or layout."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

import specdec_kernels as sk
from specdec_kernels.verify import RULES
from specdec_kernels.verify_tree import RULES as TREE_RULES
from verify_cases import bounds

NAN, INF = torch.nan, torch.inf
FLOATS = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "theta": torch.float32}


WIDTH = 9  # so that verdicts of different batches can be compared


@dataclass
class Request:
    rows: torch.Tensor  # [K + 1, V], or of a tree [D + 1, V]
    tokens: list
    parents: list  # of a tree
    q: torch.Tensor | None  # [K, V or Vd]
    kind: list  # which drafts are point masses all the same
    parameters: dict  # temperature, top_k, top_p, min_p, seed, position, theta

    def padded(self, count, tree):
        """With ``count`` drafts that are not there behind its own, and rubbish in their rows."""
        rubbish = [-1, *[10**6] * (count - 1)][:count]
        rows = torch.cat([self.rows, torch.full((count, self.rows.shape[1]), NAN, dtype=self.rows.dtype)])
        q = self.q
        if q is not None:
            q = torch.cat([q, torch.full((count, q.shape[1]), NAN, dtype=q.dtype)])
        n = len(self.tokens)
        parents = [*self.parents, *range(n - 1, n + count - 1)] if tree else []
        if tree and count:
            parents[n] = -1
        return Request(rows, self.tokens + rubbish, parents, q, self.kind + [False] * count, self.parameters)


@dataclass
class Batch:
    requests: list
    tree: bool
    rule: str
    form: str  # point, draft_logits, draft_probs
    ids: torch.Tensor | None = None  # a cut draft vocabulary
    shared: dict = field(default_factory=dict)

    def judge(self, requests=None, **how):
        function, tensors, options = self.call(requests, **how)
        return function(*tensors, **options)

    def call(self, requests=None, *, pad=0, stride=0, as_numbers=False):
        """(Function, tensors, options) that judge these requests (all of them)."""
        requests = [r.padded(pad, self.tree) if pad else r for r in (self.requests if requests is None else requests)]
        wide = lambda x: torch.cat([x, x.new_full((len(x), stride), NAN)], 1)[:, : x.shape[1]] if stride else x
        tokens = torch.tensor([x for r in requests for x in r.tokens], dtype=torch.int64)
        cu = bounds([len(r.tokens) for r in requests])
        target = wide(torch.cat([r.rows for r in requests]))
        options = {"rule": self.rule, "return_logprobs": True, **self.shared}
        for name in ("temperature", "top_k", "top_p", "min_p", "theta", "seed", "position"):
            values = [r.parameters[name] for r in requests]
            if as_numbers and len(values) == 1 and name not in ("seed", "position"):
                options[name] = values[0]
            else:
                options[name] = torch.tensor(values, dtype=FLOATS.get(name, torch.int64))
        if self.form != "point":
            options[self.form] = wide(torch.cat([r.q for r in requests]))
            if not self.tree and any(any(r.kind) for r in requests):
                options["draft_kind"] = torch.tensor([x for r in requests for x in r.kind], dtype=torch.bool)
        if self.tree:
            parents = torch.tensor([j for r in requests for j in r.parents], dtype=torch.int64)
            return sk.verify_tree, (target, tokens, parents, cu), {**options, "max_depth": WIDTH}
        if self.ids is not None:
            options["draft_ids"] = self.ids.int()
        return sk.verify, (target, tokens, cu), {**options, "max_drafts": WIDTH}


@st.composite
def batches(draw, tree):
    """Every rule, form of draft, filter, dtype; hard entries; -1 anywhere."""
    vocabulary = draw(st.sampled_from([1, 2, 3, 7, 63, 64, 65, 130, 1000]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    rule = draw(st.sampled_from(TREE_RULES if tree else RULES))
    form = draw(st.sampled_from(["point", "draft_probs"] if tree else ["point", "draft_logits", "draft_probs"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch = Batch([], tree, rule, form)
    if form != "point" and not tree and draw(st.booleans()):
        count = draw(st.integers(1, vocabulary))
        batch.ids = torch.randperm(vocabulary, generator=generator)[:count].sort().values
    if rule == "typical":
        batch.shared["typical"] = draw(st.sampled_from([(0.09, 0.3), (0.0, 0.0), (0.5, 10.0)]))
    for _ in range(draw(st.integers(1, 4))):
        batch.requests.append(draw(_requests(batch, vocabulary, dtype, generator)))
    return batch


@st.composite
def _requests(draw, batch, vocabulary, dtype, generator):
    count = draw(st.integers(0, 6 if batch.tree else 4))
    rows = torch.randn(count + 1, vocabulary, generator=generator) * draw(st.sampled_from([0.3, 2.0, 8.0]))
    if draw(st.booleans()):
        rows = rows.round()  # ties
    parents = [draw(st.integers(-1, j - 1)) for j in range(count)] if batch.tree else list(range(-1, count - 1))
    noise = torch.randn(count + 1, vocabulary, generator=generator) * draw(st.sampled_from([0.0, 0.01, 1.0]))
    likely = (rows + noise).softmax(1)
    q = likely[torch.tensor(parents, dtype=torch.int64) + 1]  # siblings share their parent's
    tokens = _tokens(parents, q if batch.ids is None else _cut(q, batch.ids), generator)
    for i in draw(st.sets(st.integers(0, 6), max_size=1)):
        if i < count:
            tokens[i] = draw(st.sampled_from([-1, *([] if batch.tree else [0, vocabulary - 1])]))
    columns = q if batch.ids is None else q[:, batch.ids]
    q = (columns.log() if batch.form == "draft_logits" else columns).to(dtype)
    rows = rows.to(dtype)
    bad = [NAN, INF, -INF]
    for x, values in ((rows, bad), (q, bad if batch.form == "draft_logits" else [NAN, INF, -0.1, 0.0])):
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3])) if len(x) else 0):
            i, j = draw(st.integers(0, len(x) - 1)), draw(st.integers(0, x.shape[1] - 1))
            x[i, j] = draw(st.sampled_from(values))
    if draw(st.integers(0, 11)) == 0:
        rows[draw(st.integers(0, count))] = draw(st.sampled_from(bad))
    parameters = {
        "temperature": draw(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0])),
        "top_k": draw(st.sampled_from([0, 1, 3, 50])),
        "top_p": draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        "theta": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "position": draw(st.integers(0, 2**63 - 1)),
    }
    kind = [bool(x) for x in torch.rand(count, generator=generator) < draw(st.sampled_from([0.0, 0.5]))]
    return Request(rows, tokens, parents if batch.tree else [], None if batch.form == "point" else q, kind, parameters)


def _cut(q, ids):
    kept = torch.zeros_like(q)
    kept[:, ids] = q[:, ids]
    return kept


def _tokens(parents, q, generator):
    """Drawn from q, siblings without replacement; -1 where nothing is left."""
    tokens, taken = [], {}
    for j, parent in enumerate(parents):
        left = (q[j] + 1e-30) * (q[j] > 0)
        left[taken.setdefault(parent, [])] = 0.0
        tokens.append(int(left.multinomial(1, generator=generator)) if left.any() else -1)
        taken[parent] += tokens[-1:] if tokens[-1] >= 0 else []
    return tokens
