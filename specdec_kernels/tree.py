"""The shape of a draft tree: a list of parents, each before its children."""

ROOT = -1


def tree_depth(tokens, parents, vocabulary):
    """The depth of the deepest node, absent ones (token -1, or below one) included; 0 without nodes.

    Raises ValueError unless parents come before their children and the ids of present nodes are in the vocabulary and
    differ between siblings.
    """
    depth, present, seen = {ROOT: 0}, {ROOT}, set()
    for j, (x, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not ROOT <= parent < j:
            raise ValueError(
                f"parents: expected a node in [-1, {j}) for node {j} (parents before their children), got {parent}"
            )
        depth[j] = depth[parent] + 1
        if x == -1 or parent not in present:
            continue
        if not 0 <= x < vocabulary:
            raise ValueError(f"tree_tokens: expected -1 or ids in [0, {vocabulary}), got {x}")
        if (parent, x) in seen:
            raise ValueError(f"tree_tokens: expected siblings with distinct ids, got a second {x} at node {j}")
        seen.add((parent, x))
        present.add(j)
    return max(depth.values())
