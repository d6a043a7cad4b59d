"""These tests run in a process of their own, in which Triton interprets its kernels (../test_triton.py starts it)."""

import os

os.environ["TRITON_INTERPRET"] = (
    "1"  # before triton is imported: a kernel is interpreted or compiled from its definition
)
