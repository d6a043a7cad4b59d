"""The packed int8 weight matrix that ``linear_int8`` multiplies by.

Layout "i8-panel16x4", version 2. Sixteen weight rows make a panel; inside a panel the k axis goes in steps
of four, and a step is 64 bytes: 16 rows x 4 consecutive k. Why: a kernel then reads the matrix front to
back exactly once, one broadcast word of four activations meets 16 output channels at once, every vector
lane is one output channel (no sum across lanes), and the 64 bytes are one cache line and one operand of the
VNNI dot product, while AVX2 can split them into even and odd bytes with a mask and a shift. Bytes hold ``w
+ 128``, because VNNI wants one unsigned operand; the correction is one number per activation row and group.
A scale group starts a new step, so any K and group size work; padding holds w = 0. Scales are f32 [panels,
groups, 16]. The layout is the same for every instruction set, every GPU and the reference. Version 2 says
whether the rows are rotated (rotation.py); version 1 had no rotation.
"""

import math
from collections.abc import Mapping

import torch

from . import native, registry
from .large_pages import LARGE, LargePages
from .rotation import hadamard
from .validate import FLOATS, integer, output, rows, shape, tensor

LAYOUT, VERSION = "i8-panel16x4", 2
PANEL, STEP = 16, 4
MAX_GROUP = (2**31 - 1) // 128**2  # an exact int32 sum of that many products of int8 values


def check_group(k, group_size):
    """The group size that applies to K values per row: ``group_size``, or K for None."""
    if k < 1:
        raise ValueError(f"weight: expected rows of at least one value, got K = {k}")
    group = k if group_size is None else integer("group_size", group_size)
    if group < 1 or k % group:
        raise ValueError(f"group_size: expected a divisor of K = {k}, got {group}")
    if group > MAX_GROUP:
        raise ValueError(f"group_size: expected at most {MAX_GROUP} (int32 sums stay exact), got {group}")
    return group


def check_rotation(rotate, group):
    if not isinstance(rotate, bool):
        raise TypeError(f"rotate: expected a bool, got {type(rotate).__name__}")
    if rotate and group & (group - 1):
        raise ValueError(f"rotate: expected a group_size that is a power of two, got {group}")
    return rotate


class Int8Weight:
    """An int8 weight matrix [n, k] in the packed layout; make one with ``pack_int8`` or
    ``Int8Weight.empty``.

    ``codes`` uint8 [panels, steps, 16, 4] and ``scale`` f32 [panels, groups, 16] are the storage. Do not
    resize or replace them: the kernels keep their addresses. ``rotated``: the codes are those of W H, H the
    Hadamard matrix of each group, and products rotate x as well (rotation.py).
    """

    __slots__ = (
        "codes",
        "device",
        "device_type",
        "group_size",
        "groups",
        "k",
        "n",
        "native",
        "rotated",
        "scale",
        "spans",
    )

    def __init__(self, n, k, group_size, codes, scale, rotated=False):
        self.n, self.k, self.group_size, self.groups = n, k, group_size, k // group_size
        self.rotated = rotated
        self.codes, self.scale = codes, scale
        self.device, self.device_type = codes.device, codes.device.type
        # What the compiled kernels want to know, in the order of their arguments.
        self.native = (n, k, group_size, rotated, codes.data_ptr(), scale.data_ptr())
        self.spans = tuple((part.data_ptr(), part.data_ptr() + part.nbytes) for part in (codes, scale))

    @classmethod
    def empty(cls, n, k, group_size=None, *, rotated=False, device="cpu", memory=None):
        """A matrix whose rows are still to be written with ``write_rows``.

        ``memory``: the :class:`LargePages` (CPU) in which a model's matrices lie together. Without it a matrix of
        several MB gets large pages of its own.
        """
        if isinstance(n, bool) or not isinstance(n, int) or isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"n, k: expected ints, got {type(n).__name__} and {type(k).__name__}")
        if n < 0:
            raise ValueError(f"n: expected a number of rows >= 0, got {n}")
        group = check_group(k, group_size)
        check_rotation(rotated, group)
        codes_shape, scale_shape = _shapes(n, k, group)
        if memory is not None and torch.device(device).type != "cpu":
            raise ValueError(f"memory: expected None for a weight on {device}, got LargePages, which are the CPU's")
        if memory is None and torch.device(device).type == "cpu" and n * k >= 2 * LARGE:
            memory = LargePages()
        if memory is None:
            codes = torch.empty(codes_shape, dtype=torch.uint8, device=device)
            scale = torch.empty(scale_shape, dtype=torch.float32, device=device)
        else:
            codes, scale = memory.empty(codes_shape, torch.uint8), memory.empty(scale_shape, torch.float32)
        return cls(n, k, group, codes, scale, rotated)

    @staticmethod
    def shapes_of(n, k, group_size=None):
        """The shapes of ``codes`` and ``scale`` of a matrix [n, k]."""
        return _shapes(n, k, check_group(k, group_size))

    @classmethod
    def nbytes_of(cls, n, k, group_size=None):
        """Bytes of a matrix [n, k], padding with it."""
        codes, scale = cls.shapes_of(n, k, group_size)
        return math.prod(codes) + 4 * math.prod(scale)

    @property
    def shape(self):
        return (self.n, self.k)

    @property
    def nbytes(self):
        return self.codes.numel() + 4 * self.scale.numel()

    def __reduce__(self):
        """Copies and pickles are built anew: ``native`` holds addresses."""
        return type(self), (self.n, self.k, self.group_size, self.codes, self.scale, self.rotated)

    def __repr__(self):
        more = ", rotated=True" if self.rotated else ""
        return f"Int8Weight({self.n}, {self.k}, group_size={self.group_size}{more}, device='{self.device}')"

    def to(self, device):
        """The same matrix on ``device``; itself if it is there already."""
        codes, scale = self.codes.to(device), self.scale.to(device)
        if codes is self.codes and scale is self.scale:
            return self
        return type(self)(self.n, self.k, self.group_size, _aligned(codes), _aligned(scale), self.rotated)

    def write_rows(self, start, values):
        """Writes rows ``start`` ...: float rows [r, k] (rotated if the matrix is, and quantised here) or a pair
        (q int8 [r, k], scale f32 [r, groups]), which a rotated matrix refuses.

        ``start`` is a multiple of 16, and so is r unless the rows end the matrix: a loader can quantise a
        big matrix chunk by chunk and never hold more than one chunk of floats.
        """
        if isinstance(values, (tuple, list)):
            if self.rotated:
                raise ValueError(
                    "values: expected float rows for a rotated matrix, got (q, scale): codes can't be rotated"
                )
            q, scale = _codes_and_scale(values, "values", self.device)
            shape("scale", scale, (q.shape[0], self.groups))
        else:
            q, scale = rows("values", tensor("values", values, FLOATS, ndim=2, device=self.device)), None
        if q.shape[1] != self.k:
            raise ValueError(f"values: expected rows of {self.k} values, got shape {list(q.shape)}")
        if isinstance(start, bool) or not isinstance(start, int):
            raise TypeError(f"start: expected an int, got {type(start).__name__}")
        end = start + q.shape[0]
        if start < 0 or start % PANEL or end > self.n:
            raise ValueError(
                f"start: expected a multiple of {PANEL} with start + {q.shape[0]} <= {self.n}, got {start}"
            )
        if end % PANEL and end != self.n:
            raise ValueError(f"values: expected a multiple of {PANEL} rows or the last rows, got {q.shape[0]} rows")
        if q.shape[0]:
            registry.call("pack_int8", self.device_type, q, scale, start, self)
        return self

    def rows(self, ids, *, out=None):
        """The dequantised rows ``ids`` (int64 [r]) in f32 [r, k]: an embedding lookup from a tied head."""
        if not tensor("ids", ids, (torch.int64,), 1, self.device).is_contiguous():
            native.not_recordable("ids had to be copied: they are not contiguous")
            ids = ids.contiguous()
        if out is None:
            out = torch.empty(ids.shape[0], self.k, dtype=torch.float32, device=self.device)
        else:
            output("out", out, torch.float32, (ids.shape[0], self.k), self.device)
        registry.call("rows_int8", self.device_type, ids, self, out)
        return out

    def unpack(self):
        """``(q int8 [n, k], scale f32 [n, groups])`` in ordinary row order: of W H if the matrix is rotated."""
        panels, steps = self.codes.shape[:2]
        padded = steps // self.groups * STEP
        q = self.codes.permute(0, 2, 1, 3).reshape(panels * PANEL, self.groups, padded)
        q = q[: self.n, :, : self.group_size].reshape(self.n, self.k)
        scale = self.scale.permute(0, 2, 1).reshape(panels * PANEL, self.groups)
        return (q ^ 128).view(torch.int8), scale[: self.n].contiguous()

    def dequantize(self):
        """The matrix W in f32 [n, k]: every element code * scale, rotated back if need be."""
        q, scale = self.unpack()
        values = q.view(self.n, self.groups, self.group_size) * scale.unsqueeze(-1)
        return (hadamard(values) / self.group_size if self.rotated else values).view(self.n, self.k)

    def state_dict(self):
        """Plain tensors, layout tag and version among them: survives ``torch.save`` and safetensors."""
        tag = torch.frombuffer(bytearray(f"{LAYOUT}/{VERSION}".encode()), dtype=torch.uint8)
        sizes = torch.tensor([self.n, self.k, self.group_size, self.rotated], dtype=torch.int64, device="cpu")
        return {"codes": self.codes, "scale": self.scale, "layout": tag, "shape": sizes}

    @classmethod
    def from_state_dict(cls, state):
        """The inverse of ``state_dict``.

        Version 1 of the layout ("shape" holds n, k, group_size) loads as not rotated. Layout "row-major/1" (codes
        int8 [n, k], scale f32 [n, groups]) is repacked; a layout or version that this build doesn't know is refused.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state: expected a dict as state_dict() makes it, got {type(state).__name__}")
        missing = [key for key in ("codes", "scale", "layout", "shape") if key not in state]
        if missing:
            raise ValueError(f"state: expected codes, scale, layout and shape, got no {', '.join(missing)}")
        tag = bytes(tensor("layout", state["layout"], (torch.uint8,), ndim=1).tolist()).decode("ascii", "replace")
        current = f"{LAYOUT}/{VERSION}"
        if tag not in (current, f"{LAYOUT}/1", "row-major/1"):
            raise ValueError(f"layout: expected {current}, {LAYOUT}/1 or row-major/1, got {tag!r}")
        sizes = tensor("shape", state["shape"], (torch.int64,), ndim=1).tolist()
        if len(sizes) != (4 if tag == current else 3) or sizes[0] < 0 or sizes[3:] not in ([], [0], [1]):
            rotated = ", rotated (0 or 1)" if tag == current else ""
            raise ValueError(f"shape: expected [n, k, group_size{rotated}], got {sizes}")
        n, k, group = sizes[:3]
        group, rotated = check_group(k, group), check_rotation(sizes[3:] == [1], group)
        codes, scale = state["codes"], state["scale"]
        if tag == "row-major/1":
            shape("codes", tensor("codes", codes, (torch.int8,)), (n, k))
            return cls.empty(n, k, group, device=codes.device).write_rows(0, (codes, scale))
        codes_shape, scale_shape = _shapes(n, k, group)
        shape("codes", tensor("codes", codes, (torch.uint8,)), codes_shape)
        shape("scale", tensor("scale", scale, (torch.float32,), device=codes.device), scale_shape)
        return cls(n, k, group, _aligned(codes), _aligned(scale), rotated)


def _shapes(n, k, group):
    panels, groups = (n + PANEL - 1) // PANEL, k // group
    return (panels, groups * ((group + STEP - 1) // STEP), PANEL, STEP), (panels, groups, PANEL)


def _aligned(value):
    """Contiguous and on a cache line, as the kernels read it: a file's mapping may be neither."""
    value = value.contiguous()
    return value if value.data_ptr() % 64 == 0 else value.clone()


def _codes_and_scale(pair, name, device=None):
    if len(pair) != 2:
        raise ValueError(f"{name}: expected a pair (q, scale), got {len(pair)} values")
    q = rows("q", tensor("q", pair[0], (torch.int8,), ndim=2, device=device))
    scale = tensor("scale", pair[1], (torch.float32,), ndim=2, device=q.device)
    return q, rows("scale", scale)


def pack_int8(weight, *, group_size=None, rotate=False):
    """Packs a weight matrix for ``linear_int8``.

    ``weight`` is a float matrix [N, K] (f32, f16, bf16), quantised by the library's formula (per row or per
    group of ``group_size`` values: s = amax/127, q = round_half_even(w/s)), or a pair (q int8 [N, K], scale
    f32 [N, G]) that is taken as it is. ``rotate`` (float weights, ``group_size`` a power of two) multiplies every
    group by a Hadamard matrix before it is quantised, and ``linear_int8`` does the same to x: the product is the
    same up to rounding, and large single activations cost less accuracy. Returns an :class:`Int8Weight`.
    """
    if isinstance(weight, (tuple, list)):
        q, scale = _codes_and_scale(weight, "weight")
        n, k = q.shape
        groups = scale.shape[1]
        if scale.shape[0] != n or groups < 1 or k % groups:
            raise ValueError(f"scale: expected shape [{n}, G] with G a divisor of {k}, got {list(scale.shape)}")
        if group_size is not None and integer("group_size", group_size) * groups != k:
            raise ValueError(f"group_size: expected {k // groups} to go with {groups} scales per row, got {group_size}")
        if check_rotation(rotate, 1):
            raise ValueError("rotate: expected False with (q, scale), got True: codes can't be rotated")
        return Int8Weight.empty(n, k, k // groups, device=q.device).write_rows(0, (q, scale))
    n, k = tensor("weight", weight, FLOATS, ndim=2).shape
    packed = Int8Weight.empty(n, k, group_size, rotated=rotate, device=weight.device)
    return packed.write_rows(0, rows("weight", weight))
