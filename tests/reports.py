"""Maps from public reports to tests: whether the tests that a map names exist."""

import ast
from pathlib import Path


def functions(file):
    """Names of the test functions of a file in this folder, those of its classes with them."""
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def check(what, where):
    """An entry holds: its tests exist, or it says at length why it needs none."""
    assert where or len(what) > 60, "neither a test nor a reason"
    for file, name in where:
        assert name in functions(file), f"{file} has no {name}"
