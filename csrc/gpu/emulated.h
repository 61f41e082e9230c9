// How the emulation of the chain kernels behaves; for tests.
#pragma once

#include <cstdint>

namespace nasfast::gpu {

// For all launches from now on; see Emulation. Results must depend on multiprocessors and shared_memory alone, which is
// that of a block in KiB.
void set_emulation(int multiprocessors, bool backwards, uint64_t block_order, int shared_memory);

}  // namespace nasfast::gpu
