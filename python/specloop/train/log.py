"""What is measured while a training runs, a line of JSON each."""

from __future__ import annotations

import json
import math

from ..formats.safetensors import disk_errors


def append(path, record: dict) -> None:
    """One line more, the whole of it or nothing. Raises DiskError."""
    line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
    with disk_errors(path), open(path, "ab", buffering=0) as file:
        before = file.tell()
        done = file.write(line)
        try:
            while done < len(line):  # there was no room for all of it: why, the next call says
                done += file.write(line[done:])
        except OSError:
            file.truncate(before)
            raise


def finite(value):
    """Plain values with None for what is no finite number, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
