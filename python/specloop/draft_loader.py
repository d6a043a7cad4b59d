"""From the name of a draft to a model that drafts for one target.

"builtin" is the draft that comes with the package for the target, found by the target's fingerprint; "auto" the same,
or none where there is none. Other names are files (formats/draft_file.py) or models as targets are.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from .errors import OptionError
from .fingerprint import fingerprint
from .options import BUILTIN

AUTO = "auto"
FOLDER = "data/drafts"  # of the package
BEST = ("feature", "model")  # of the builtin drafts of one target


def builtin_files() -> list[Path]:
    """Of the drafts in the package."""
    folder = resources.files("specloop").joinpath(FOLDER)
    if not folder.is_dir():
        return []
    return sorted(Path(str(file)) for file in folder.iterdir() if file.name.endswith(".safetensors"))


def best_builtin(own: str | None) -> Path | None:
    """The best of the package's drafts for the target of that fingerprint."""
    from .formats.draft_file import DraftFile

    found = [file for file in map(DraftFile.open, builtin_files()) if file.target["fingerprint"] == own]
    return Path(min(found, key=lambda file: (BEST.index(file.kind), file.path)).path) if found else None


def presumed(name) -> str:
    """What a pair's choice may become: to check options by, before the target is there."""
    return name if name != AUTO else BUILTIN if builtin_files() else "lookup"


def needs_target(name) -> bool:
    """Whether a draft of that name can be loaded only when its target is there."""
    if name in (AUTO, BUILTIN):
        return True
    path = Path(os.path.expanduser(name))
    if not path.is_file() or path.suffix == ".gguf":
        return False
    from .formats.draft_file import is_draft_file

    return is_draft_file(path)


def file_for(name, target) -> Path | None:
    """The file of a draft for a target (a Version); None: "auto", and there is none. Raises OptionError."""
    if name not in (AUTO, BUILTIN):
        return Path(os.path.expanduser(name))
    path = best_builtin(fingerprint(target.model, target.tokenizer)) if builtin_files() else None
    if path is None and name == BUILTIN:
        raise OptionError(f"draft: there is no builtin one for {target.name}; expected auto, lookup, none or a path")
    return path


def file_beside(name, target) -> Path | None:
    """The same for a target that is not loaded: by its name, from what is in its file."""
    if name not in (AUTO, BUILTIN):
        return Path(os.path.expanduser(name))
    if not builtin_files():
        return None
    from .loader import fingerprint_of_file

    return best_builtin(fingerprint_of_file(target))


def load_draft(path, target, *, kv, context, progress=None):
    """(model, tokenizer, None) of a draft file for a target, a Version that is loaded; on its device.

    Raises OptionError for a draft of another target, or of another vocabulary, ModelError as the reader does.
    """
    import torch

    from .formats.draft_file import DraftFile
    from .layout import layer_shapes
    from .models.feature_head import FeatureHead, HeadWeights
    from .models.llama import Llama
    from .models.weights import Layer, Resident

    file = DraftFile.open(path)
    check_fits(file, target)
    weights = file.weights(progress)
    device = getattr(target.model, "device", torch.device("cpu"))
    w = {name: weight.to(device) for name, weight in weights.items()}
    config = file.config
    layers = [Layer(**{name: w[f"layer.{i}.{name}"] for name in layer_shapes(config)}) for i in range(config.layers)]
    if file.kind == "feature":
        own = HeadWeights(target.model.weights.embed, w["embedding_norm"], w["fc"], layers, w["norm"], w["head"])
    else:
        own = Resident(w["embedding"], layers, w["norm"], w["head"])
    options = {"context": context, "kv": kv, "eos_ids": target.tokenizer.eos_ids, "name": file.path}
    kind = FeatureHead if file.kind == "feature" else Llama
    return kind(config, own, **options), target.tokenizer, None


def check_fits(file, target) -> None:
    """Raises OptionError unless the draft file is for this target (a Version)."""
    vocabulary = getattr(target.tokenizer, "fingerprint", None)
    if file.vocabulary != vocabulary:
        raise OptionError(
            f"draft: expected one with the vocabulary of {target.name} ({vocabulary}), "
            f"{file.path} has another one ({file.vocabulary})"
        )
    if file.kind != "feature":
        return
    if not getattr(target.model, "feature_size", None):
        raise OptionError(f"draft: {file.path} reads its target's hidden states, and {target.name} is one without")
    own = fingerprint(target.model, target.tokenizer)
    if file.target["fingerprint"] != own:
        raise OptionError(
            f"draft: expected one for {target.name} ({own}), {file.path} is for {file.target['name']} "
            f"({file.target['fingerprint']})"
        )
    if file.config.hidden != target.model.feature_size:
        raise OptionError(
            f"draft: expected features of {target.model.feature_size} numbers, {file.path} reads {file.config.hidden}"
        )


def size_in_memory(path, *, kv, context) -> int:
    """All that the draft of a file takes, with the features that its target has to keep for one request."""
    from .formats.draft_file import DraftFile
    from .models.buffers import CHUNK, needs

    file = DraftFile.open(path)
    size = file.nbytes + sum(needs(file.config, kv=kv, context=context).values())
    if file.kind == "feature":
        features = 2 * file.config.hidden * min(context, file.config.context)
        size += 2 * features + CHUNK * 2 * file.config.hidden * 4
    return size
