"""What the models know of GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What decides how many programs (thread blocks) a multiprocessor holds at once.

    Attributes:
        processors: number of multiprocessors; each issues 4 warp instructions per cycle.
        program_shared, shared: bytes of shared memory that one program may use, and that a multiprocessor has.
        registers, threads, programs: the limits of a multiprocessor.
    """

    name: str
    processors: int
    program_shared: int
    shared: int
    threads: int
    programs: int
    registers: int = 65536

    def programs_per_processor(self, warps: int, registers: int, shared: int) -> int:
        """The number of programs that a multiprocessor holds at once."""
        # a warp gets registers in units of 256; the system takes 1 KiB of shared memory per program
        by_registers = self.registers // (-(-registers * 32 // 256) * 256 * warps)
        return min(by_registers, self.threads // (32 * warps), self.shared // (shared + 1024), self.programs)


@dataclass(frozen=True, kw_only=True)
class Gpu(Limits):
    """A GPU whose times are modelled.

    Attributes:
        clock: frequency in Hz.
        bandwidth: memory bandwidth in bytes per second, from published measurements of copies.
        multiply_cycles: assumed cycles for which a product of a 16 x 16 and a 16 x 8 matrix occupies a quarter of a
            multiprocessor.
    """

    clock: float
    bandwidth: float
    multiply_cycles: float


_KIB = 1024
# by compute capability; the first is the default of the models
GPUS = {
    90: Gpu(
        name="H200",
        processors=132,
        clock=1.755e9,
        bandwidth=4.3e12,
        multiply_cycles=7,
        program_shared=227 * _KIB,
        shared=228 * _KIB,
        threads=2048,
        programs=32,
    ),
    86: Gpu(
        name="RTX 3080",
        processors=68,
        clock=1.71e9,
        bandwidth=0.76e12,
        multiply_cycles=32,
        program_shared=99 * _KIB,
        shared=100 * _KIB,
        threads=1536,
        programs=16,
    ),
}
LIMITS: dict[int, Limits] = {
    80: Limits(name="A100", processors=108, program_shared=163 * _KIB, shared=164 * _KIB, threads=2048, programs=32),
    86: GPUS[86],
    89: Limits(name="RTX 4090", processors=128, program_shared=99 * _KIB, shared=100 * _KIB, threads=1536, programs=24),
    90: GPUS[90],
}
