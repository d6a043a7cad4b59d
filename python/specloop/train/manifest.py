"""``corpus.json``: what the shards of a corpus are a function of, and how many of them are wanted.

A folder is gone on with for the same target and settings alone. The number of shards is no part of what is compared: it
is what was asked for last, so that a corpus whose writing was ended is known to lack some.
"""

from __future__ import annotations

import json
import os

from ..errors import FormatError, OptionError, show
from ..formats import safetensors
from .corpus import FORM, shard_numbers

MANIFEST = "corpus.json"
WANTED = "shards"  # the key of their number
BEFORE = {"dtype": "int8"}  # what holds for manifests from before they said so


def read_manifest(folder) -> dict | None:
    """What ``corpus.json`` says; None where there is none. Raises FormatError."""
    path = _path(folder)
    try:
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(told, dict) or told.get("form") != FORM:
        got = show(told.get("form") if isinstance(told, dict) else told)
        raise FormatError(f"{path}: expected the manifest of a corpus, form {FORM}, got {got}")
    wanted = told.get(WANTED)
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise FormatError(f"{path}: {WANTED}: expected a number of shards, got {show(wanted)}")
    return BEFORE | told


def begin(folder, manifest: dict, shards: int | None = None) -> None:
    """Makes the folder and its manifest, or sees that what is there goes on with the same. ``shards``: so many are
    wanted from now on.

    Raises OptionError that names what differs, FormatError, DiskError.
    """
    manifest, folder = {**BEFORE, "form": FORM, **manifest}, os.fspath(folder)
    with safetensors.disk_errors(folder):
        os.makedirs(folder, exist_ok=True)
    told = read_manifest(folder)
    if told is None:
        if shard_numbers(folder):
            raise OptionError(f"{folder}: expected an empty folder or a corpus, got shards without {MANIFEST}")
    else:
        compare(folder, {key: value for key, value in told.items() if key != WANTED}, manifest)
        manifest = told
    wanted = manifest if shards is None else manifest | {WANTED: shards}
    if wanted != told:
        _write(folder, wanted)


def want(folder, shards: int) -> None:
    """So many shards are wanted from now on, all of which are there: where the manifest says another number."""
    told = read_manifest(folder) or {}
    if told.get(WANTED, shards) != shards:
        _write(folder, told | {WANTED: shards})


def compare(folder, told: dict, asked: dict) -> None:
    """Raises OptionError for the first difference between what a folder says of itself and what is asked for."""
    asked = json.loads(json.dumps(asked))
    for key, value, wanted in _differences(told, asked):
        raise OptionError(f"{folder}: holds another corpus: {key}: it has {show(value)}, asked for {show(wanted)}")


def _differences(one, other, above=""):
    for key in sorted({*one, *other}):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{above}{key}.")
        elif a != b:
            yield f"{above}{key}", a, b


def _path(folder):
    return os.path.join(os.fspath(folder), MANIFEST)


def _write(folder, manifest):
    safetensors.write_text(_path(folder), json.dumps(manifest, indent=1) + "\n")
