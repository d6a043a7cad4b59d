"""Which safetensors files a model's folder consists of, by its index, strictly."""

import json
import os

from . import checks
from .errors import PackError
from .files import PackFile, show
from .safetensors import header_of, unique

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX = 100_000_000


class Shards:
    """The open files of a model: ``tensors`` maps each name to (index into ``files``, Entry).

    Use as a context manager, or take the files over with ``keep``.
    """

    def __init__(self, source):
        """``source``: a folder, or a list of files. Raises OSError or PackError."""
        self.files, self.tensors, self.metadata = [], {}, []
        try:
            paths, listed = _paths(source)
            for path in paths:
                self._open(path)
            if listed is not None:
                self._compare(os.fspath(source), listed, paths)
        except BaseException:
            self.close()
            raise

    def _open(self, path):
        number = len(self.files)
        self.files.append(PackFile(path))
        entries, metadata = header_of(self.files[-1])
        self.metadata.append(metadata)
        for name, entry in entries.items():
            if name in self.tensors:
                other = self.files[self.tensors[name][0]].path
                raise PackError(f"{path}: tensor {show(name)} is in {other}, too")
            self.tensors[name] = number, entry

    def _compare(self, folder, listed, paths):
        """What the index says must be so: every tensor in the file that it names."""
        for name, shard in listed.items():
            if name not in self.tensors:
                raise PackError(f"{folder}: the index says that tensor {show(name)} is in {show(shard)}; it is nowhere")
            here = os.path.basename(paths[self.tensors[name][0]])
            if here != shard:
                raise PackError(
                    f"{folder}: the index says that tensor {show(name)} is in {show(shard)}; it is in {show(here)}"
                )

    def keep(self):
        """The files, which the caller closes from now on."""
        files, self.files = self.files, []
        return files

    def close(self):
        for file in self.files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _paths(source):
    """``(paths, {tensor: file name} or None)``"""
    if isinstance(source, (list, tuple)):
        if not source:
            raise ValueError("source: expected a folder or one or more files, got an empty list")
        return [checks.path("source", path) for path in source], None
    folder = checks.path("source", source)
    if not os.path.isdir(folder):
        return [folder], None
    index = os.path.join(folder, INDEX)
    if os.path.exists(index):
        listed = read_index(index)
        names = sorted(set(listed.values()))
        missing = [name for name in names if not os.path.exists(os.path.join(folder, name))]
        if missing:
            raise PackError(f"{index}: files that it names are missing: {', '.join(map(show, missing))}")
        return [os.path.join(folder, name) for name in names], listed
    single = os.path.join(folder, SINGLE)
    if os.path.exists(single):
        return [single], None
    others = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if name in os.listdir(folder)]
    more = f"; {others[0]} belongs to pickle files, which are not read" if others else ""
    raise PackError(f"{folder}: has neither {SINGLE} nor {INDEX}{more}")


def read_index(path):
    """{tensor name: file name} of an index file; file names are plain names of files next to the index."""
    with PackFile(path) as file:
        if file.size > MAX_INDEX:
            raise PackError(f"{path}: expected at most {MAX_INDEX} bytes, got {file.size}")
        text = bytearray(file.size)
        file.read_into(text, 0)
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
        listed = fields.get("weight_map") if isinstance(fields, dict) else None
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path}: not valid JSON: {str(error)[:200]}") from None
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise PackError(f"{path}: weight_map: expected an object of file names, got {show(listed)}")
    for name in listed.values():
        # A name with a folder in it could lead anywhere on this machine.
        if not name.endswith(".safetensors") or any(c in name for c in "/\\\0:") or name.startswith("."):
            raise PackError(f"{path}: weight_map: expected .safetensors files of this folder, got {show(name)}")
    return listed
