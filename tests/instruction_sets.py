"""The instruction sets that this machine can run, for tests that compare or force them; none without a CPU module."""

from specdec_kernels import native

ISAS = native.ISA_NAMES[: native.ISA_NAMES.index(native.cpu.machine_isa()) + 1] if native.cpu else ()
