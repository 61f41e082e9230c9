// Blocks of threads as one text for a GPU and for its emulation on the host.
//
// A kernel is a struct with the number of its threads, its arguments and one function:
//
//   struct Kernel {
//     static constexpr int kThreads = 256, kBlocks = 2;  // of a block; blocks per multiprocessor to keep registers for
//     struct Args { ... };
//     template <class Block>
//     static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared);
//   };
//
// The function is a sequence of phases. `block.each(f)` calls f(thread) for every thread of the block, `block.warps(f)`
// calls f(warp) for every warp, and within it `warp.each(f)` calls f(lane) for every lane. What needs a whole warp
// (matrix products, shuffles) is a member of the warp. A phase does not wait for the other threads; `block.sync()` does.
// A thread keeps its own numbers from phase to phase in a `Local`. Code outside of the phases runs in every thread with
// the same values.
//
// On the GPU every phase is inlined and a Local is a variable. On the host a warp runs alone to the next barrier, in
// either order of warps; its phases are loops over its lanes, a Local is an array that begins as NaN, and asynchronous
// copies arrive as late as they may. So a missing barrier between warps, a number that is used before it is set and an
// access outside of an array show on a machine without a GPU. Races between the lanes of a warp may not.
#pragma once

#include "formats.h"

#ifndef __CUDACC__
#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <functional>
#include <vector>

#include "warp_scheduler.h"
#endif

namespace nasfast::gpu {

// Bytes of a block's shared memory that no launch can have, because members of Block use them.
constexpr size_t kReserved = 1024;

// 8 numbers of 16 bits or 4 of 32, and 4 of 16 bits: what one instruction loads or stores.
struct alignas(16) Vec4 {
  uint32_t v[4];
};
struct alignas(8) Vec2 {
  uint32_t v[2];
};

NASFAST_ANYWHERE constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
NASFAST_ANYWHERE constexpr int smaller(int a, int b) { return a < b ? a : b; }
NASFAST_ANYWHERE constexpr int larger(int a, int b) { return a > b ? a : b; }

#ifdef __CUDACC__

NASFAST_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Reads shared memory where the call stands. The compiler would otherwise keep the numbers in registers, and spill.
NASFAST_DEVICE void load_again(const float* from, float (&to)[1]) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to[0]) : "r"(shared_address(from)));
}
NASFAST_DEVICE void load_again(const float* from, float (&to)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(shared_address(from)));
}
NASFAST_DEVICE void load_again(const float* from, float (&to)[4]) {
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(shared_address(from)));
}

// Ends the program with an error.
NASFAST_DEVICE void trap() { __trap(); }

// Keeps a number in a register. The compiler would otherwise compute it again wherever it is used.
NASFAST_DEVICE void keep(int& number) { asm volatile("" : "+r"(number)); }

// Stores 16 bytes of global memory by one instruction. Left to itself, the compiler stores each number once it is known.
NASFAST_DEVICE void store_vector(void* to, const Vec4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(v.v[0]), "r"(v.v[1]),
               "r"(v.v[2]), "r"(v.v[3]));
}

// Reads what another block of the same launch has written.
NASFAST_DEVICE Vec2 load_fresh(const Vec2* from) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
  return {v.x, v.y};
}
NASFAST_DEVICE Vec4 load_fresh(const Vec4* from) {
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from));
  return {v.x, v.y, v.z, v.w};
}

// Numbers that each thread, or each lane of a warp, keeps for itself.
template <class T>
struct Local {
  T value;
  template <class Owner>
  NASFAST_DEVICE explicit Local(const Owner&) {}
  NASFAST_DEVICE T& operator[](int) { return value; }
};

struct Warp {
  int index;

  template <class F>
  NASFAST_DEVICE void each(const F& f) const {
    f(static_cast<int>(threadIdx.x) % 32);
  }
  NASFAST_DEVICE void sync() const { __syncwarp(); }

  // Loads four 8 x 8 matrices of 16-bit numbers from shared memory. address(lane) is row lane % 8 of matrix lane / 8,
  // aligned to 16 bytes. to(lane)[j] gets the elements 2 (lane % 4) and + 1 of row lane / 4 of matrix j.
  template <class To, class Address>
  NASFAST_DEVICE void load_matrices(const To& to, const Address& address) const {
    auto& d = to(lane());
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(address(lane())))
                 : "memory");
  }
  // The same with every matrix transposed.
  template <class To, class Address>
  NASFAST_DEVICE void load_transposed(const To& to, const Address& address) const {
    auto& d = to(lane());
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(address(lane())))
                 : "memory");
  }
  // Transposes the 8 x 8 matrix of which each lane has the elements 2 (lane % 4) and + 1 of row lane / 4.
  template <class Pair>
  NASFAST_DEVICE void transpose(const Pair& pair) const {
    uint32_t& p = pair(lane());
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(p));
  }
  // d += a b of a 16 x 16 by a 16 x 8 matrix. With g = lane / 4 and t = lane % 4, a lane has of a the pairs (row g, columns
  // 2 t and + 1), (g + 8, 2 t), (g, 2 t + 8), (g + 8, 2 t + 8); of b (rows 2 t and + 1, column g), (2 t + 8, g); of d the
  // numbers (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1). d(lane), a(lane) and b(lane) are arrays.
  template <class Format, class D, class A, class B>
  NASFAST_DEVICE void multiply_16(const D& d, const A& a, const B& b) const {
    multiply_16(Format{}, d(lane()), a(lane()), b(lane()));
  }
  // d = a b + start, where start(lane) is an array like d(lane).
  template <class Format, class D, class A, class B, class Start>
  NASFAST_DEVICE void multiply_16(const D& d, const A& a, const B& b, const Start& start) const {
    multiply_16(Format{}, d(lane()), a(lane()), b(lane()), start(lane()));
  }
  // d += a b with depth 8: a has the first two pairs, b the first.
  template <class Format, class D, class A, class B>
  NASFAST_DEVICE void multiply_8(const D& d, const A& a, const B& b) const {
    multiply_8(Format{}, d(lane()), a(lane()), b(lane()));
  }
  // Every lane gets the sum over the lanes that differ from it in bits between `step` and 16; the order is that of the
  // bits, lowest first. value(lane) is a float&.
  template <class Value>
  NASFAST_DEVICE void add_lanes(const Value& value, int step) const {
    float& v = value(lane());
    NASFAST_UNROLL
    for (int bit = step; bit < 32; bit *= 2) v += __shfl_xor_sync(~0u, v, bit);
  }
  // Every lane gets the number that source(lane) has.
  template <class Value, class Source>
  NASFAST_DEVICE void from_lane(const Value& value, const Source& source) const {
    float& v = value(lane());
    v = __shfl_sync(~0u, v, source(lane()));
  }

 private:
  static NASFAST_DEVICE int lane() { return static_cast<int>(threadIdx.x) % 32; }

#define NASFAST_MMA(FORMAT, TYPE)                                                                                     \
  template <class D, class A, class B, class C>                                                                       \
  static NASFAST_DEVICE void multiply_16(FORMAT, D& d, const A& a, const B& b, const C& c) {                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                               \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"                                     \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), \
                   "f"(c[3]));                                                                                        \
  }                                                                                                                   \
  template <class D, class A, class B>                                                                                \
  static NASFAST_DEVICE void multiply_16(FORMAT, D& d, const A& a, const B& b) {                                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                               \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                         \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                 \
  }                                                                                                                   \
  template <class D, class A, class B>                                                                                \
  static NASFAST_DEVICE void multiply_8(FORMAT, D& d, const A& a, const B& b) {                                       \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE                                                \
                 ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                                  \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));                                                                  \
  }
  NASFAST_MMA(Bf16, "bf16")
  NASFAST_MMA(Fp16, "f16")
#undef NASFAST_MMA
};

struct Block {
  int x, y;              // place in the grid
  int count_x, count_y;  // size of the grid

  template <class F>
  NASFAST_DEVICE void each(const F& f) const {
    f(static_cast<int>(threadIdx.x));
  }
  template <class F>
  NASFAST_DEVICE void warps(const F& f) const {
    f(Warp{static_cast<int>(threadIdx.x) / 32});
  }
  NASFAST_DEVICE void sync() const { __syncthreads(); }

  // Shared memory besides that of the launch; the same at every call with this size.
  template <int N>
  NASFAST_DEVICE float* shared_floats() const {
    __shared__ float memory[N];
    return memory;
  }

  // Begins to copy 16 bytes from global to shared memory, both aligned; zeros if not `valid`. Called within each().
  NASFAST_DEVICE void copy(void* to, const void* from, bool valid = true) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
  }
  // Ends a group of copies. Called outside of the phases.
  NASFAST_DEVICE void commit() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Waits for this thread's copies except those of the last N groups; block.sync() then makes them visible to others.
  template <int N>
  NASFAST_DEVICE void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
  }

  // Whether this block is the last one of `count` that come here with this counter, which is then 0 again. Every block
  // has written what the last one reads (with load_fresh) before it calls this.
  NASFAST_DEVICE bool comes_last(int* counter, int count) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      // the barriers extend what this releases and acquires to all threads of the block
      int before;
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(__cvta_generic_to_global(counter))
                   : "memory");
      last = before == count - 1;
      if (last) *counter = 0;
    }
    __syncthreads();
    return last;
  }
};

#else  // the emulation

inline void load_again(const float* from, float (&to)[1]) { to[0] = from[0]; }
inline void load_again(const float* from, float (&to)[2]) { to[0] = from[0], to[1] = from[1]; }
inline void load_again(const float* from, float (&to)[4]) { std::copy_n(from, 4, to); }
inline void trap() { std::abort(); }
inline void keep(int&) {}
inline void store_vector(void* to, const Vec4& v) { *static_cast<Vec4*>(to) = v; }
template <class T>
T load_fresh(const T* from) {
  return *from;
}

template <class T>
struct Local {
  struct Item {
    T value;
  };
  const int first;  // thread of the block, or lane of the warp
  Item items[32];

  template <class Owner>
  explicit Local(const Owner& owner) : first(owner.first()) {
    memset(static_cast<void*>(items), 0xff, sizeof items);
  }
  T& operator[](int i) {
    assert(i >= first && i < first + 32);
    return items[i - first].value;
  }
};

struct Warp {
  int index;
  bool backwards;

  static int first() { return 0; }
  template <class F>
  void each(const F& f) const {
    for (int i = 0; i < 32; ++i) f(backwards ? 31 - i : i);
  }
  void sync() const {}

  template <class To, class Address>
  void load_matrices(const To& to, const Address& address) const {
    load(to, address, [](const auto& row, int i, int j) { return row(i)[j]; });
  }
  template <class To, class Address>
  void load_transposed(const To& to, const Address& address) const {
    load(to, address, [](const auto& row, int i, int j) { return row(j)[i]; });
  }
  template <class Pair>
  void transpose(const Pair& pair) const {
    uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      m[lane / 4][2 * (lane % 4)] = static_cast<uint16_t>(pair(lane));
      m[lane / 4][2 * (lane % 4) + 1] = static_cast<uint16_t>(pair(lane) >> 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      pair(lane) = m[2 * (lane % 4)][lane / 4] | uint32_t{m[2 * (lane % 4) + 1][lane / 4]} << 16;
    }
  }
  template <class Format, class D, class A, class B>
  void multiply_16(const D& d, const A& a, const B& b) const {
    multiply<Format, 16>(d, a, b);
  }
  template <class Format, class D, class A, class B, class Start>
  void multiply_16(const D& d, const A& a, const B& b, const Start& start) const {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) d(lane)[i] = start(lane)[i];
    }
    multiply<Format, 16>(d, a, b);
  }
  template <class Format, class D, class A, class B>
  void multiply_8(const D& d, const A& a, const B& b) const {
    multiply<Format, 8>(d, a, b);
  }
  template <class Value>
  void add_lanes(const Value& value, int step) const {
    for (int bit = step; bit < 32; bit *= 2) {
      float before[32];
      for (int lane = 0; lane < 32; ++lane) before[lane] = value(lane);
      for (int lane = 0; lane < 32; ++lane) value(lane) += before[lane ^ bit];
    }
  }
  template <class Value, class Source>
  void from_lane(const Value& value, const Source& source) const {
    float before[32];
    for (int lane = 0; lane < 32; ++lane) before[lane] = value(lane);
    for (int lane = 0; lane < 32; ++lane) value(lane) = before[source(lane)];
  }

 private:
  template <class To, class Address, class Element>
  static void load(const To& to, const Address& address, const Element& element) {
    const uint16_t* rows[32];
    for (int lane = 0; lane < 32; ++lane) {
      rows[lane] = reinterpret_cast<const uint16_t*>(address(lane));
      assert(reinterpret_cast<uintptr_t>(rows[lane]) % 16 == 0);
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int j = 0; j < 4; ++j) {
        const auto row = [&](int i) { return rows[8 * j + i]; };
        const int i = lane / 4, column = 2 * (lane % 4);
        to(lane)[j] = element(row, i, column) | uint32_t{element(row, i, column + 1)} << 16;
      }
    }
  }

  template <class Format, int kDepth, class D, class A, class B>
  static void multiply(const D& d, const A& a, const B& b) {
    float left[16][kDepth], right[kDepth][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int k = 0; k < kDepth; k += 8) {
        for (int h = 0; h < 2; ++h) {
          left[g + 8 * h][2 * t + k] = Format::first(a(lane)[h + k / 4]);
          left[g + 8 * h][2 * t + k + 1] = Format::second(a(lane)[h + k / 4]);
        }
        right[2 * t + k][g] = Format::first(b(lane)[k / 8]);
        right[2 * t + k + 1][g] = Format::second(b(lane)[k / 8]);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float& sum = d(lane)[i];
        for (int k = 0; k < kDepth; ++k) sum += left[lane / 4 + i / 2 * 8][k] * right[k][2 * (lane % 4) + i % 2];
      }
    }
  }
};

struct Block {  // as one of its warps sees it
  int x, y, count_x, count_y;
  Warp warp;
  WarpScheduler* scheduler;
  mutable std::vector<std::vector<std::function<void()>>> groups = {{}};  // copies that have begun; the last is open

  int first() const { return 32 * warp.index; }
  template <class F>
  void each(const F& f) const {
    warp.each([&](int lane) { f(first() + lane); });
  }
  template <class F>
  void warps(const F& f) const {
    f(warp);
  }
  void sync() const { scheduler->wait(); }

  template <int N>
  float* shared_floats() const {
    scheduler->floats.resize(N, NAN);
    return scheduler->floats.data();
  }

  void copy(void* to, const void* from, bool valid = true) const {
    assert(reinterpret_cast<uintptr_t>(to) % 16 == 0);
    memset(to, 0xff, 16);
    if (valid) {
      assert(reinterpret_cast<uintptr_t>(from) % 16 == 0);
      groups.back().push_back([=] { memcpy(to, from, 16); });
    } else {
      groups.back().push_back([=] { memset(to, 0, 16); });
    }
  }
  void commit() const { groups.emplace_back(); }
  template <int N>
  void wait() const {
    while (static_cast<int>(groups.size()) > N + 1) {
      for (const auto& copy : groups.front()) copy();
      groups.erase(groups.begin());
    }
  }

  bool comes_last(int* counter, int count) const {
    sync();
    if (warp.index == 0) {
      scheduler->last = ++*counter == count;
      if (scheduler->last) *counter = 0;
    }
    sync();
    return scheduler->last;
  }
};

#endif

}  // namespace nasfast::gpu
