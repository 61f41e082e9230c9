// Memory of the tensors that the CPU operators make, recycled from step to step.
//
// A fresh page costs a fault and its zeros, about 2 us per 4 KiB on a virtual machine: as much as half of the arithmetic of a
// training step, in which the same sizes come and go. One range of address space is reserved, backed by huge pages where the
// system allows, and cut first-fit; what is given back is kept for the next tensor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nasfast::cpu {

// Bytes from which the pool serves; below, malloc recycles well.
constexpr size_t kPoolMinBytes = 256 * 1024;

// Uninitialised memory aligned to 64 bytes. Throws std::bad_alloc.
void* pool_allocate(size_t bytes);

// Gives back what pool_allocate returned.
void pool_free(void* data);

// Returns the pages of free memory to the system.
void pool_empty_cache();

// Bytes in use now, and the extent of the range that was ever in use.
struct PoolUse {
  int64_t used, reached;
};
PoolUse pool_use();

// Whether pool_allocate fills memory with NaN, for tests that look for reads of uninitialised memory.
void pool_poison(bool on);

// Owner of a piece of the pool.
class PoolBlock {
 public:
  explicit PoolBlock(size_t bytes) : data_(pool_allocate(bytes)) {}
  ~PoolBlock() { pool_free(data_); }
  PoolBlock(const PoolBlock&) = delete;
  PoolBlock& operator=(const PoolBlock&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
};

}  // namespace nasfast::cpu
