"""torch.compile sees the verify family as operations: schemas, fakes, one node per call, the same tokens as eager."""

import shutil

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import library


def rows(count, vocabulary, seed=0):
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def chain(requests, drafts, vocabulary):
    """(target_logits, draft_tokens, cu_drafts) with the same number of drafts in every request."""
    ids = torch.randint(0, vocabulary, (requests * drafts,), generator=torch.Generator().manual_seed(drafts))
    bounds = torch.arange(0, requests * drafts + 1, max(drafts, 1), dtype=torch.int32)
    return rows(requests * (drafts + 1), vocabulary), ids, bounds


def tree(requests, vocabulary):
    """(target_logits, tree_tokens, parents, cu_nodes): two children of the root, two of the first of them."""
    ids = torch.tensor([1, 2, 3, 4]).repeat(requests)
    parents = torch.tensor([-1, -1, 0, 0]).repeat(requests)
    return rows(5 * requests, vocabulary), ids, parents, torch.arange(0, 4 * requests + 1, 4, dtype=torch.int32)


def keys(requests):
    return {"seed": torch.arange(requests), "position": torch.full((requests,), 7)}


POINT = {"draft_logits": None, "draft_probs": None, "draft_ids": None, "draft_kind": None}
ONE = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0, **keys(2)}
EACH = ONE | {"temperature": torch.tensor([0.5, 0.0]), "top_k": torch.tensor([3, 0]), "min_p": torch.zeros(2)}
GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "position": None}
TOKEN = {"rule": "token", "theta": None, "typical": (0.09, 0.3)}
THRESHOLD = TOKEN | {"rule": "threshold", "theta": torch.tensor([0.1, 0.2])}
CHAIN, LEAF = chain(2, 3, 50), (rows(2, 50), torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int32))
TREE = {"draft_probs": None, "max_depth": 2}
LIKELY = (CHAIN[0], CHAIN[0].argmax(1)[[0, 1, 2, 4, 5, 6]], CHAIN[2])  # what a greedy request accepts
PATH = (CHAIN[0][:4], LIKELY[1][:3], torch.arange(-1, 2), torch.tensor([0, 3], dtype=torch.int32))
CALLS = {
    "greedy": ("verify", CHAIN, POINT | GREEDY | TOKEN | {"max_drafts": 3}),
    "random": ("verify", CHAIN, POINT | ONE | TOKEN | {"max_drafts": 4}),
    "each": ("verify", CHAIN, POINT | EACH | TOKEN | {"max_drafts": 3}),
    "dense": ("verify", CHAIN, POINT | ONE | TOKEN | {"max_drafts": 3, "draft_logits": rows(6, 50, 1)}),
    "no drafts": ("verify", LEAF, POINT | ONE | TOKEN | {"max_drafts": 0}),
    "threshold": ("verify", CHAIN, POINT | ONE | THRESHOLD | {"max_drafts": 3}),
    "tree": ("verify_tree", tree(2, 50), TREE | ONE | TOKEN),
    "deep tree": ("verify_tree", tree(2, 50), TREE | EACH | TOKEN | {"max_depth": 4}),
    "tree with q": ("verify_tree", tree(2, 50), TREE | ONE | TOKEN | {"draft_probs": rows(8, 50, 1).softmax(-1)}),
    "accepted": ("verify", LIKELY, POINT | GREEDY | TOKEN | {"max_drafts": 3}),
    "accepted path": ("verify_tree", PATH, TREE | GREEDY | TOKEN | {"max_depth": 3}),
    "sample": ("sample", (rows(2, 50),), ONE | {"stream": 3, "index": 0}),
    "sample each": ("sample", (rows(2, 50),), EACH | {"stream": 0, "index": torch.tensor([0, 2])}),
}


FULL = ("no drafts", "accepted", "accepted path", "sample", "sample each")  # no NaN beyond the emitted tokens


@pytest.mark.parametrize(
    "name, return_logprobs", [*((name, False) for name in CALLS), *((name, True) for name in FULL)]
)
def test_opcheck(name, return_logprobs):
    operation, tensors, options = CALLS[name]
    arguments = library.arguments(options) | {"return_logprobs": return_logprobs}
    torch.library.opcheck(getattr(torch.ops.specdec, operation).default, tensors, arguments)


@pytest.mark.parametrize("return_logprobs", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_operation_equals_the_public_function(name, return_logprobs):
    operation, tensors, options = CALLS[name]
    options = options | {"return_logprobs": return_logprobs}
    public = getattr(sk, operation)(*tensors, **options)
    public = public if isinstance(public, tuple) else (public, None)
    for ours, theirs in zip(library.call(operation, *tensors, **options), public, strict=True):
        assert ours.shape == (0,) if theirs is None else torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


def step(target_logits, draft_tokens, cu_drafts, temperature, table, max_drafts):
    """A round of a loop: judge the drafts, take the last token, draw the next draft from its row."""
    requests = cu_drafts.shape[0] - 1
    seed, position = torch.arange(requests), torch.full((requests,), 7)
    verdict = sk.verify(
        target_logits, draft_tokens, cu_drafts, temperature=temperature, top_p=0.9, seed=seed, position=position,
        max_drafts=max_drafts, return_logprobs=True,
    )  # fmt: skip
    last = verdict.tokens.gather(1, verdict.num_accepted.long()[:, None])[:, 0]
    position = position + verdict.num_accepted + 1
    draft = sk.sample(table[last], temperature=temperature, seed=seed, position=position, stream=0)
    return *verdict, draft


def tree_step(target_logits, tree_tokens, parents, cu_nodes):
    requests = cu_nodes.shape[0] - 1
    verdict = sk.verify_tree(
        target_logits, tree_tokens, parents, cu_nodes, temperature=0.8, seed=torch.arange(requests),
        position=torch.zeros(requests, dtype=torch.int64), max_depth=2,
    )  # fmt: skip
    path, tokens, num_accepted, logprobs, flags = verdict
    assert logprobs is None
    return path, tokens + 1, num_accepted, flags


def same(a, b):
    return all(torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in zip(a, b, strict=True))


@pytest.fixture
def compiled():
    """compile(function, backend): with no graph break allowed and sizes that may vary."""
    torch._dynamo.reset()
    yield lambda function, backend: torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    torch._dynamo.reset()


def steps():
    for requests, drafts, vocabulary, temperature in (
        (2, 3, 50, 0.7),
        (3, 2, 64, 0.7),
        (4, 1, 90, 0.7),
        (2, 4, 70, 1.3),
    ):
        yield *chain(requests, drafts, vocabulary), temperature, rows(vocabulary, vocabulary, 5), drafts
    yield *chain(2, 3, 50), torch.tensor([0.5, 1.0]), rows(50, 50, 5), 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_compiles_to_one_graph(compiled, backend):
    run = compiled(step, backend)
    for arguments in steps():
        assert same(run(*arguments), step(*arguments))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_tree_step_compiles_to_one_graph(compiled, backend):
    run = compiled(tree_step, backend)
    for requests, vocabulary in ((2, 50), (3, 64), (1, 90)):
        assert same(run(*tree(requests, vocabulary)), tree_step(*tree(requests, vocabulary)))


def test_sizes_do_not_recompile(compiled):
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    run = compiled(step, backend)
    for arguments in list(steps())[:3]:
        run(*arguments)
    assert len(graphs) == 1
    assert [str(target) for target in graphs[0]].count("specdec.verify") == 1
    assert [str(target) for target in graphs[0]].count("specdec.sample") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_tokens(compiled):
    run = compiled(step, "inductor")
    for arguments in steps():
        assert same(run(*arguments), step(*arguments))


def test_width_must_be_given(compiled):
    for function in (
        lambda *tensors: sk.verify(*tensors[:3], temperature=0),
        lambda *tensors: sk.verify_tree(tensors[0], tensors[1], tensors[1] * 0 - 1, tensors[2], temperature=0),
    ):
        with pytest.raises(
            RuntimeError, match=r"max_(drafts|depth): expected an integer under torch.compile, got None"
        ):
            compiled(function, "eager")(*CHAIN)


def test_wrong_sizes_are_refused_while_tracing(compiled):
    target_logits, *rest = CHAIN
    with pytest.raises(RuntimeError, match="target_logits: expected"):
        compiled(lambda *tensors: sk.verify(*tensors, temperature=0, max_drafts=3), "eager")(target_logits[:7], *rest)


def test_bad_values_are_refused_when_run(compiled):
    run = compiled(lambda *tensors: sk.verify(*tensors, temperature=0, max_drafts=3).tokens, "aot_eager")
    target_logits, draft_tokens, cu_drafts = CHAIN
    assert torch.equal(run(*CHAIN), sk.verify(*CHAIN, temperature=0).tokens)
    with pytest.raises(ValueError, match="draft_tokens: expected"):
        run(target_logits, draft_tokens + 50, cu_drafts)


def test_export(tmp_path):
    class Verify(torch.nn.Module):
        def forward(self, target_logits, draft_tokens, cu_drafts):
            return tuple(sk.verify(target_logits, draft_tokens, cu_drafts, temperature=0, max_drafts=3)[:2])

    program = torch.export.export(Verify(), CHAIN)
    torch.export.save(program, tmp_path / "verify.pt2")
    exported = torch.export.load(tmp_path / "verify.pt2").module()
    assert same(exported(*CHAIN), Verify()(*CHAIN))
