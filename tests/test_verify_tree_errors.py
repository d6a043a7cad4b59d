"""Bad arguments of verify_tree: an error that names the argument, what was expected and what came."""

import math

import pytest
import torch

import specdec_kernels as sk
from verify_cases import bounds, keys

NAN = math.nan
# Two requests: nodes 0 and 1 below the root and 2 below 0; and one node.
GOOD = {
    "target_logits": torch.zeros(6, 8),
    "tree_tokens": torch.tensor([1, 2, 1, 3]),
    "parents": torch.tensor([-1, -1, 0, -1]),
    "cu_nodes": bounds([3, 1]),
}


def verify_tree(**changes):
    arguments = {**GOOD, **keys(2), **changes}
    tensors = [arguments.pop(name) for name in GOOD]
    return sk.verify_tree(*tensors, **arguments)


def probabilities(rows=4, columns=8):
    return torch.full((rows, columns), 1 / columns)


def test_the_good_call_is_good():
    for options in ({}, {"draft_probs": probabilities()}, {"parents": GOOD["parents"].int()}):
        verdict = verify_tree(**options)
        assert verdict.flags.tolist() == [0, 0] and tuple(verdict.path.shape) == (2, 2)


def test_absent_nodes_may_hold_anything():
    """Below an absent node ids are not looked at, siblings may repeat."""
    changes = {"tree_tokens": torch.tensor([-1, -1, 99, 3])}
    assert verify_tree(**changes).flags.tolist() == [0, 0]


VALUES = [
    ("target_logits", {"target_logits": torch.zeros(5, 8)}),
    ("target_logits", {"target_logits": torch.zeros(6, 8, 1)}),
    ("target_logits", {"target_logits": torch.zeros(6, 0)}),
    ("target_logits", {"target_logits": torch.zeros(8, 6).t()}),
    ("target_logits", {"target_logits": torch.zeros(6, 8, requires_grad=True)}),
    ("target_logits", {"target_logits": torch.zeros(6, 8, device="meta")}),
    ("target_logits", {"target_logits": torch.zeros(6, 8).to_sparse()}),
    ("tree_tokens", {"tree_tokens": torch.tensor([1, 8, 1, 3])}),
    ("tree_tokens", {"tree_tokens": torch.tensor([1, -2, 1, 3])}),
    ("tree_tokens", {"tree_tokens": torch.tensor([2, 2, 1, 3])}),  # siblings twice
    ("tree_tokens", {"tree_tokens": torch.tensor([[1, 2, 1, 3]])}),
    ("tree_tokens", {"tree_tokens": torch.tensor([1, 2, 1, 3], device="meta")}),
    ("parents", {"parents": torch.tensor([-1, -1, 2, -1])}),  # its own parent
    ("parents", {"parents": torch.tensor([1, 0, 0, -1])}),  # a cycle
    ("parents", {"parents": torch.tensor([-1, 2, 0, -1])}),  # a parent behind its child
    ("parents", {"parents": torch.tensor([-1, -1, 0, 0])}),  # numbered inside the request: node 0 is itself
    ("parents", {"parents": torch.tensor([-1, -2, 0, -1])}),
    ("parents", {"parents": torch.tensor([-1, -1, 2**32, -1])}),
    ("parents", {"parents": torch.tensor([-1, -1, 0])}),
    ("parents", {"parents": torch.tensor([[-1, -1, 0, -1]])}),
    ("parents", {"parents": torch.tensor([-1, -1, 0, -1], device="meta")}),
    ("cu_nodes", {"cu_nodes": bounds([3, 2])}),
    ("cu_nodes", {"cu_nodes": torch.tensor([1, 3, 4], dtype=torch.int32)}),
    ("cu_nodes", {"cu_nodes": torch.tensor([0, 5, 4], dtype=torch.int32)}),
    ("cu_nodes", {"cu_nodes": torch.tensor([], dtype=torch.int32)}),
    ("cu_nodes", {"cu_nodes": bounds([3, 1]).to("meta")}),
    ("draft_probs", {"draft_probs": probabilities(rows=3)}),
    ("draft_probs", {"draft_probs": probabilities(columns=7)}),
    ("draft_probs", {"draft_probs": probabilities(8, 4).t()}),
    ("draft_probs", {"draft_probs": probabilities().to("meta")}),
    ("max_depth", {"max_depth": 1}),
    ("max_depth", {"max_depth": -1}),
    ("rule", {"rule": "block"}),  # of chains
    ("rule", {"rule": None}),
    ("theta", {"rule": "threshold"}),
    ("theta", {"rule": "threshold", "theta": NAN}),
    ("theta", {"rule": "threshold", "theta": torch.tensor([0.5])}),
    ("typical", {"rule": "typical", "typical": (0.1,)}),
    ("typical", {"rule": "typical", "typical": (-0.1, 0.3)}),
    ("temperature", {"temperature": -1.0}),
    ("temperature", {"temperature": NAN}),
    ("temperature", {"temperature": torch.tensor([1.0, math.inf])}),
    ("top_k", {"top_k": torch.tensor([1, 2, 3])}),
    ("top_p", {"top_p": -0.1}),
    ("min_p", {"min_p": 1.5}),
    ("seed", {"seed": None}),
    ("seed", {"seed": torch.tensor([1])}),
    ("position", {"position": None}),
    ("position", {"position": torch.tensor([1, -1])}),
    ("seed", {"seed": torch.ones(2, dtype=torch.int64, device="meta")}),
]

TYPES = [
    ("target_logits", {"target_logits": [[0.0]]}),
    ("target_logits", {"target_logits": torch.zeros(6, 8, dtype=torch.float64)}),
    ("tree_tokens", {"tree_tokens": torch.tensor([1.0, 2.0, 1.0, 3.0])}),
    ("tree_tokens", {"tree_tokens": [1, 2, 1, 3]}),
    ("parents", {"parents": torch.tensor([-1.0, -1.0, 0.0, -1.0])}),
    ("parents", {"parents": [-1, -1, 0, -1]}),
    ("cu_nodes", {"cu_nodes": torch.tensor([0, 3, 4])}),
    ("draft_probs", {"draft_probs": probabilities().double()}),
    ("max_depth", {"max_depth": 2.0}),
    ("temperature", {"temperature": "hot"}),
    ("theta", {"rule": "threshold", "theta": "low"}),
]


@pytest.mark.parametrize(("name", "changes"), VALUES, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_values(name, changes):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*(got|require grad)"):
        verify_tree(**changes)


@pytest.mark.parametrize(("name", "changes"), TYPES, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_types(name, changes):
    with pytest.raises(TypeError, match=rf"^{name}: expected .*got"):
        verify_tree(**changes)


def test_the_message_says_where():
    with pytest.raises(ValueError, match=r"parents: expected a node in \[-1, 2\) for node 2 .* got 2"):
        verify_tree(parents=torch.tensor([-1, -1, 2, -1]))
    with pytest.raises(ValueError, match=r"tree_tokens: .* distinct ids, got a second 2 at node 1"):
        verify_tree(tree_tokens=torch.tensor([2, 2, 1, 3]))
    with pytest.raises(ValueError, match="'traversal'"):
        verify_tree(rule="block")
