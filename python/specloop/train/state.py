"""Whether a state is that of the training which is to go on from it."""

from __future__ import annotations

import json

from ..errors import OptionError, show
from .plan import Settings

MEMORY = ("micro_rows", "checkpointing")  # settings that say how a step is made, not what is learnt in it


def check(path, state: dict, settings, products: str, **mine) -> None:
    """Raises OptionError that names the first thing in which the training of ``state`` is another.

    ``products``: the dtype of matrix products, "f32", "bf16" or "fp16", that ``settings.precision`` came to here.
    ``mine``: what it belongs to, plain JSON: about, shards, logged. States of before lack products and about's
    fingerprint; then they are not compared.
    """
    theirs = dict(state, settings=Settings.from_dict(state.get("settings")).as_dict())
    apart = MEMORY
    if "products" in state:  # however they were asked for
        apart = (*MEMORY, "precision")
        _expect(path, "precision", state["products"], products)
    elif bool(state.get("scaler")) != (products == "fp16"):
        _expect(path, "precision", "fp16" if state.get("scaler") else "f32 or bf16", products)
    for name, value in {"settings": settings.as_dict(), **mine}.items():
        was, now = (json.loads(json.dumps(v)) for v in (theirs.get(name), value))
        if name == "settings":
            was, now = ({key: v for key, v in told.items() if key not in apart} for told in (was, now))
        if name == "about" and "fingerprint" not in (was or ()):
            now = {key: v for key, v in now.items() if key != "fingerprint"}
        if isinstance(was, dict) and isinstance(now, dict):
            for key in {**now, **was}:
                _expect(path, key, was.get(key), now.get(key))
        else:
            _expect(path, name, was, now)


def _expect(path, name, theirs, mine):
    if theirs != mine:
        raise OptionError(f"{name}: {path} is of a training with {show(theirs)}, got {show(mine)}")
