#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

namespace nasfast::cpu {
namespace {

constexpr size_t kHugePage = 2 * 1024 * 1024;
constexpr size_t kAlignment = 64;

#ifdef __SANITIZE_ADDRESS__
constexpr bool kPooled =
    false;  // each tensor has memory of its own, so that the sanitizer sees any access beyond its end
#else
constexpr bool kPooled = true;
#endif

std::atomic<bool> poison{false};

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

class Pool {
 public:
  Pool() : page_(static_cast<size_t>(sysconf(_SC_PAGE_SIZE))) {
    if (!kPooled || !address_space_is_free()) return;
    const size_t size = round_up(static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_, kHugePage);
    // this only reserves addresses: the system provides pages when they are first written
    void* range =
        mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return;
    size_ = size;
    start_ = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(range), kHugePage));
#ifdef MADV_HUGEPAGE
    madvise(start_, size_, MADV_HUGEPAGE);
#endif
    free_[start_] = size_;
  }

  void* allocate(size_t bytes) {
    const size_t size = round_up(bytes, page_);
    std::lock_guard<std::mutex> lock(mutex_);
    // first fit: low addresses are used first, which keeps the range short
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < size) continue;
      char* data = it->first;
      const size_t rest = it->second - size;
      free_.erase(it);
      if (rest) free_[data + size] = rest;
      used_[data] = size;
      in_use_ += size;
      const size_t end = static_cast<size_t>(data + size - start_);
      if (end > reached_) reached_ = end;
      return data;
    }
    return nullptr;
  }

  // Takes back what `allocate` returned. False if data is not in the range.
  bool release(char* data) {
    if (size_ == 0 || data < start_ || data >= start_ + size_) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto used = used_.find(data);
    if (used == used_.end()) abort();  // was given back twice
    size_t size = used->second;
    used_.erase(used);
    in_use_ -= size;
    auto next = free_.lower_bound(data);
    if (next != free_.end() && data + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == data) {
        before->second += size;
        return true;
      }
    }
    free_[data] = size;
    return true;
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& block : free_) {
      // blocks are whole pages; what was never reached has no pages
      const size_t begin = static_cast<size_t>(block.first - start_);
      if (begin < reached_) madvise(block.first, block.second, MADV_DONTNEED);
    }
    reached_ = used_.empty() ? 0 : static_cast<size_t>(used_.rbegin()->first - start_) + used_.rbegin()->second;
  }

  // Called around a fork: a child must not inherit a lock that another thread holds.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  PoolUse use() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {static_cast<int64_t>(in_use_), static_cast<int64_t>(reached_)};
  }

 private:
  // Whether a process may reserve as much address space as there is memory, at no cost to itself or to others.
  static bool address_space_is_free() {
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return false;
    std::ifstream file("/proc/sys/vm/overcommit_memory");
    int mode = 0;
    file >> mode;
    return mode != 2;  // with strict accounting a reservation counts as memory
  }

  std::mutex mutex_;
  const size_t page_;
  char* start_ = nullptr;
  size_t size_ = 0;  // 0: all memory comes from malloc
  size_t in_use_ = 0;
  size_t reached_ = 0;
  std::map<char*, size_t> free_;  // neighbouring blocks are joined
  std::map<char*, size_t> used_;
};

// The pool is never destroyed, because tensors may be freed after static destructors have run.
Pool& pool() {
  static Pool* instance = [] {
    auto* created = new Pool;
    pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); }, [] { pool().unlock(); });
    return created;
  }();
  return *instance;
}

}  // namespace

void* pool_allocate(size_t bytes) {
  void* data = kPooled && bytes >= kPoolMinBytes ? pool().allocate(bytes) : nullptr;
  if (data == nullptr && posix_memalign(&data, kAlignment, bytes ? bytes : 1) != 0) throw std::bad_alloc();
  if (poison) memset(data, 0xff, bytes);  // a NaN in float32 and bfloat16
  return data;
}

void pool_free(void* data) {
  if (!pool().release(static_cast<char*>(data))) free(data);
}

void pool_empty_cache() { pool().empty_cache(); }

PoolUse pool_use() { return pool().use(); }

void pool_poison(bool on) { poison = on; }

}  // namespace nasfast::cpu
