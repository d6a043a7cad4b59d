"""A trained draft as a file that the engine opens."""

from __future__ import annotations

from ..formats.draft_file import packed, write_draft


def export(path, draft, *, kind, target, vocabulary, recipe, values=None, dtype="int8"):
    """Writes ``draft`` (networks.py) to ``path``: a whole file or none.

    ``values``: other values of its parameters, by name (an average). ``target``: {"name", "fingerprint"};
    ``vocabulary``: the tokenizer's fingerprint; ``recipe``: what made it, plain JSON. ``dtype``: "int8", or "f32" for
    toys. Raises DiskError.
    """
    weights = {}
    for name, parameter in draft.named_parameters():
        value = (parameter if values is None else values[name]).detach().float().cpu()
        matrix = value.dim() == 2 and dtype == "int8"
        weights[name.replace("layers.", "layer.")] = packed(value) if matrix else value
    about = {"target": target, "vocabulary": vocabulary, "recipe": recipe}
    write_draft(path, kind=kind, config=draft.config, draft_ids=draft.draft_ids, weights=weights, **about)


def fitting(config):
    """The dtype of a draft's matrices: "f32" for toys, whose rows are no longer than a scale group."""
    return "int8" if config.hidden >= 64 else "f32"
