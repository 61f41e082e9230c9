// Memory for the tensors that the CPU operators make, recycled from step to step.
//
// A fresh page costs a page fault and the writing of zeros, about 2 us per 4 KiB on a virtual machine. In a training
// step, which allocates and frees the same sizes again and again, this is as much as half of the arithmetic. So one
// range of address space is reserved, with huge pages where the system allows them, and allocated first-fit; memory
// that is given back is kept for the next tensor. A training step takes 0.78 (float32) and 0.98 (bfloat16) of its time
// with glibc as it is, and 0.98 and 1.00 with a glibc that keeps its pages, at 0.81 of the peak (docs/speed.md, The
// allocator's share).
#pragma once

#include <cstddef>
#include <cstdint>

namespace nasfast::cpu {

// The pool serves requests of this many bytes or more; malloc recycles smaller ones well.
constexpr size_t kPoolMinBytes = 256 * 1024;

// Uninitialised memory aligned to 64 bytes. Throws std::bad_alloc.
void* pool_allocate(size_t bytes);

// Gives back what pool_allocate returned.
void pool_free(void* data);

// Returns the pages of free blocks to the system.
void pool_empty_cache();

// Bytes in use now, and how far into the range memory was ever in use.
struct PoolUse {
  int64_t used, reached;
};
PoolUse pool_use();

// Makes pool_allocate fill memory with NaN, for tests that look for reads of uninitialised memory.
void pool_poison(bool on);

// Owns a piece of the pool and gives it back.
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
