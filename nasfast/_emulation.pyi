"""nasfast._emulation: the CUDA kernels, emulated on the host, for tests. Only with NASFAST_EMULATION=ON."""

def set_emulation(
    multiprocessors: int = 2, backwards: bool = False, block_order: int = 0, shared_memory: int = 99
) -> None:
    """How the emulated CUDA kernels of chains run from now on; without arguments, as at the start.

    Results may depend on `multiprocessors`, because it decides how launches are divided into blocks, on
    `shared_memory`, because it decides which kernels run, and on nothing else.

    Args:
        multiprocessors: of the emulated GPU.
        backwards: the threads of a block take their turns in descending order.
        block_order: 0 for ascending, 1 for descending, otherwise the seed of a random order.
        shared_memory: KiB that a block can have; 99 as on sm_86, and 227 on sm_90.
    """
