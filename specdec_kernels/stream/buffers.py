"""The bytes of tensors as Python buffers, without a copy and without NumPy."""

import ctypes

import torch


def view_of(memory):
    """A writable memoryview of the bytes of ``memory``: a contiguous CPU tensor, or a buffer."""
    if not isinstance(memory, torch.Tensor):
        return memoryview(memory).cast("B")
    if memory.device.type != "cpu" or not memory.is_contiguous():
        raise ValueError(f"memory: expected a contiguous CPU tensor, got one on {memory.device}")
    if memory.numel() == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    array.owner = memory  # the view keeps the array, the array keeps the tensor
    return memoryview(array).cast("B")
