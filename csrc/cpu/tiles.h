// Matrix products on the tile registers of AMX, which gemm.h uses where there are any.
//
// A tile has 16 rows of 64 bytes. One instruction multiplies 16 rows of A by 16 columns of B over 32 elements of depth,
// in bfloat16 with float sums, in the time of 16 vector instructions. So even float is multiplied as bfloat16: a float
// is the exact sum of three of them, high + middle + low, each at least 2^8 times smaller than the one before. Of the
// nine products of two such sums, the three smallest are below the rounding of float and are left out.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__)

namespace nasfast::cpu::NASFAST_ISA {

constexpr int kTileSide = 16;   // rows of A and columns of B in one tile
constexpr int kTileDepth = 32;  // bfloat16 elements in a row of a tile

// A float in a tile of A or a packed B. 32 neighbours in depth are three rows of tiles: high, middle and low.
struct SplitFloat {
  uint16_t parts[3];
};
constexpr int kSplitParts = 3;
constexpr int64_t kSplitTile = 1024;  // bytes of a tile of B

struct Parts {
  VecF high, middle, low;
};

inline Parts split(VecF v) {
  // rounding to nearest by addition of half a unit; NaN stays NaN, and an infinity has NaN in its lower parts: see
  // multiply_row
  const auto round = [](VecF x) { return as_float((as_bits(x) + 0x8000) & 0xffff0000); };
  const VecF high = round(v);
  const VecF rest = v - high;
  const VecF middle = round(rest);
  return {high, middle, rest - middle};
}

inline void store(SplitFloat* p, VecF v, AllLanes) {
  const Parts parts = split(v);
  // A vector is one half of these rows, and begins 96 bytes behind the vector before it. As 32 elements begin at a
  // multiple of 64 bytes, bit 5 of the address says which half it is.
  char* half = reinterpret_cast<char*>(p) - 2 * (reinterpret_cast<uintptr_t>(p) & 32);
  store(reinterpret_cast<BFloat16*>(half), parts.high, AllLanes{});
  store(reinterpret_cast<BFloat16*>(half + 64), parts.middle, AllLanes{});
  store(reinterpret_cast<BFloat16*>(half + 128), parts.low, AllLanes{});
}

// Writes zeros beyond the given lanes, to which a tile of A has memory.
inline void store(SplitFloat* p, VecF v, int lanes) { store(p, keep_lanes(v, lanes), AllLanes{}); }

// The tile registers of one thread as this file uses them, for the duration of one phase.
class TileRegisters {
 public:
  TileRegisters() {
    static const struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {kTileSide, kTileSide, kTileSide, kTileSide, kTileSide, kTileSide, kTileSide, kTileSide};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Tiles 0 to 3 are sums: 0 and 1 of the upper rows, 2 and 3 of the lower ones. 4 and 5 are of A, 6 and 7 of B.
template <int kWidth, bool kLower>
inline void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kWidth > 1) _tile_dpbf16ps(1, 4, 7);
  if constexpr (kLower) _tile_dpbf16ps(2, 5, 6);
  if constexpr (kLower && kWidth > 1) _tile_dpbf16ps(3, 5, 7);
}

// Loads rows of A that are `step` bytes apart; the lower ones begin kTileSide rows behind the upper ones.
template <bool kLower>
inline void load_rows(const char* a, int64_t step) {
  _tile_loadd(4, a, step);
  if constexpr (kLower) _tile_loadd(5, a + kTileSide * step, step);
}

// Loads kWidth tiles of B, `apart` bytes apart, with `step` bytes between their rows.
template <int kWidth>
inline void load_columns(const char* b, int64_t apart, int64_t step) {
  _tile_loadd(6, b, step);
  if constexpr (kWidth > 1) _tile_loadd(7, b + apart, step);
}

template <int kWidth, bool kLower>
inline void sum_products(const BFloat16* a, int64_t lda, const char* b, int64_t depth) {
  constexpr int64_t kRow = 64;  // bytes of two neighbours in depth, in one vector of columns
  const char* rows = reinterpret_cast<const char*>(a);
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    load_rows<kLower>(rows + k * 2, lda * 2);
    load_columns<kWidth>(b + k / 2 * kWidth * kRow, kRow, kWidth * kRow);
    multiply_tiles<kWidth, kLower>();
  }
}

template <int kWidth, bool kLower>
inline void sum_products(const SplitFloat* a, int64_t lda, const char* b, int64_t depth) {
  constexpr int64_t kMiddle = 64, kLow = 128;  // bytes behind the high parts
  const int64_t step = lda * static_cast<int64_t>(sizeof(SplitFloat));
  const char* rows = reinterpret_cast<const char*>(a);
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    const auto columns = [&](int part) { load_columns<kWidth>(b + part * kSplitTile, kSplitParts * kSplitTile, 64); };
    // each product has a factor of the one before it, which is not loaded again
    load_rows<kLower>(rows, step);
    columns(2);
    multiply_tiles<kWidth, kLower>();  // high * low
    columns(1);
    multiply_tiles<kWidth, kLower>();  // high * middle
    load_rows<kLower>(rows + kMiddle, step);
    multiply_tiles<kWidth, kLower>();  // middle * middle
    columns(0);
    multiply_tiles<kWidth, kLower>();  // middle * high
    load_rows<kLower>(rows + kLow, step);
    multiply_tiles<kWidth, kLower>();  // low * high
    load_rows<kLower>(rows, step);
    multiply_tiles<kWidth, kLower>();  // high * high
    rows += kTileDepth * sizeof(SplitFloat);
    b += kWidth * kSplitParts * kSplitTile;
  }
}

// Tiles 0 to 3 = product of 16 rows of A, or 32 with kLower, with kWidth vectors of columns.
template <int kWidth, bool kLower, typename C>
inline void multiply_block(const C* a, int64_t lda, const C* b, int64_t depth) {
  __asm__ volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  sum_products<kWidth, kLower>(a, lda, reinterpret_cast<const char*>(b), depth);
}

// The vectors of a block of sums: up to 2 kTileSide rows of two vectors of columns.
using TileSums = float[2][2 * kTileSide * kLanes];

// Writes what multiply_block computed: sums[j][row].
template <int kWidth, bool kLower>
inline void store_block(TileSums& sums) {
  constexpr int kBelow = kTileSide * kLanes;
  _tile_stored(0, sums[0], 64);
  if constexpr (kWidth > 1) _tile_stored(1, sums[1], 64);
  if constexpr (kLower) _tile_stored(2, sums[0] + kBelow, 64);
  if constexpr (kLower && kWidth > 1) _tile_stored(3, sums[1] + kBelow, 64);
  __asm__ volatile("" ::: "memory");
}

inline bool has_nan(VecF v) { return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) != 0; }

// The product of one row of A with vector `j` of a panel of `width` vectors, by vector instructions. `multiply_block`
// has a NaN where an element is infinite, because the element's lower parts are NaN.
[[gnu::noinline]] inline VecF multiply_row(const SplitFloat* a, const SplitFloat* panel, int64_t depth, int j,
                                           int width) {
  const auto join = [](VecF high, VecF middle, VecF low) {
    const VecF sum = high + middle + low;
    return high - high == 0.0f ? sum : high;  // an infinity is its high part alone
  };
  const char* row = reinterpret_cast<const char*>(a);
  const char* column = reinterpret_cast<const char*>(panel) + j * kSplitParts * kSplitTile;
  VecF sum{};
  for (int64_t k = 0; k < depth; ++k) {
    const int64_t tile = k / kTileDepth * kSplitParts, at = k % kTileDepth;
    VecF left[kSplitParts], right[kSplitParts];
    for (int part = 0; part < kSplitParts; ++part) {
      uint16_t bits;
      memcpy(&bits, row + (tile + part) * 64 + at * 2, sizeof bits);
      left[part] = as_float(VecU{} + (static_cast<uint32_t>(bits) << 16));
      VecU pairs;  // of two neighbours in depth
      memcpy(&pairs, column + (tile * width + part) * kSplitTile + at / 2 * 64, sizeof pairs);
      right[part] = as_float(at % 2 ? pairs & 0xffff0000 : pairs << 16);
    }
    sum += join(left[0], left[1], left[2]) * join(right[0], right[1], right[2]);
  }
  return sum;
}

}  // namespace nasfast::cpu::NASFAST_ISA

#endif
