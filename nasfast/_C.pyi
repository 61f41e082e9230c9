"""nasfast._C: what this build is and how it runs here. Importing it registers `torch.ops.nasfast`."""

from typing import TypedDict

class BuildInfo(TypedDict):
    compiler: str
    flags: str
    torch_version: str
    torch_target: str
    isas: list[str]
    cuda: bool
    cuda_version: str | None
    cuda_archs: str | None
    cuda_operators: bool

class CudaDeviceInfo(TypedDict):
    count: int
    kernels_run: bool
    binary_version: int
    ptx_version: int
    old_driver: bool
    error: str

def build_info() -> BuildInfo:
    """Compiler, its flags, the torch compiled against and the oldest one served, instruction sets, CUDA."""

def isa() -> str:
    """The instruction set the CPU kernels use: the best usable one, or NASFAST_ISA.

    Raises:
        RuntimeError: NASFAST_ISA names none that is usable here.
    """

def usable_isas() -> list[str]:
    """The compiled instruction sets this processor runs, ascending."""

def empty_cache() -> None:
    """Return the pages of the CPU operators' free memory to the system."""

def poison_pool(on: bool) -> None:
    """Fill the memory of new tensors with NaN, for tests."""

def pool_bytes() -> tuple[int, int]:
    """Bytes of the CPU operators' memory in use, and the extent of what was ever used since `empty_cache`."""

def num_threads() -> int:
    """Threads of torch's pool, which the CPU kernels share."""

def cuda_device_info(device: int = 0) -> CudaDeviceInfo:
    """GPUs the driver offers, and whether the compiled kernels run on this one; needs neither GPU nor driver."""

def set_early_launches(on: bool) -> bool:
    """Whether CUDA kernels may start early from now on; returns whether they could. Only with CUDA operators."""

def set_emulation(
    multiprocessors: int = 2, backwards: bool = False, block_order: int = 0, shared_memory: int = 99
) -> None:
    """How the emulated CUDA kernels of chains run from now on, for tests; without arguments, as at the start.

    Results may depend on `multiprocessors`, because it decides how launches are divided into blocks, on
    `shared_memory`, because it decides which kernels run, and on nothing else.

    Args:
        multiprocessors: of the emulated GPU.
        backwards: the threads of a block take their turns in descending order.
        block_order: 0 for ascending, 1 for descending, otherwise the seed of a random order.
        shared_memory: KiB that a block can have; 99 as on sm_86, and 227 on sm_90.
    """
