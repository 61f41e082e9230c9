// Matrix products on a tile of rows: C = A B. A (rows x depth) is in this thread's cache; B (depth x columns) is a
// convolution weight, packed once per call.
//
// A block of C, kBlockRows x (1 to kPanelVectors vectors), stays in registers while the loop goes through the depth.
// Tensors of bfloat16 are multiplied as bfloat16 with float sums where the processor has a dot product for it,
// otherwise as float. Where it has AMX, tiles.h multiplies both types.
#pragma once

#include "bn_tile.h"
#include "simd.h"
#include "tiles.h"

namespace nasfast::cpu::NASFAST_ISA {

#if defined(__AVX512F__)
constexpr int kBlockRows = 8;  // 8 x 3 sums, 3 vectors of B, 1 of A: 28 of 32 registers
#else
constexpr int kBlockRows = 4;  // 4 x 3 sums, 3 vectors of B, 1 of A: all 16 registers
#endif
#if defined(__AMX_BF16__)
constexpr int kPanelVectors = 2;  // two tiles
constexpr int kRowMultiple = kTileSide;
#else
constexpr int kPanelVectors = 3;
constexpr int kRowMultiple = kBlockRows;

class TileRegisters {
 public:
  TileRegisters() {}  // written out, so that a variable of this type counts as used
};
#endif

// The type in which tensors of storage type T are multiplied.
template <typename T>
struct Multiplied {
  using Type = float;
};
#if defined(__AVX512BF16__)
template <>
struct Multiplied<BFloat16> {
  using Type = BFloat16;
};
#endif
#if defined(__AMX_BF16__)
template <>
struct Multiplied<float> {
  using Type = SplitFloat;
};
#endif

// How B is packed: kStep elements of depth lie side by side, and zeros fill the depth up to a multiple of kMultiple.
template <typename C>
struct Packing {
  static constexpr int kStep = 1, kMultiple = 1;
};
template <>
struct Packing<BFloat16> {
#if defined(__AMX_BF16__)
  static constexpr int kStep = 2, kMultiple = kTileDepth;
#else
  static constexpr int kStep = 2, kMultiple = 2;
#endif
};
#if defined(__AMX_BF16__)
template <>
struct Packing<SplitFloat> {
  static constexpr int kStep = 2, kMultiple = kTileDepth;
};
#endif

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Leading dimension of a tile of A: whole vectors, but not a multiple of 2048 bytes, because then all rows of a block
// would share two sets of the first-level cache.
template <typename C>
inline int64_t tile_ld(int64_t depth) {
  const int64_t ld = divide_up(depth, 32) * 32;
  return ld * static_cast<int64_t>(sizeof(C)) % 2048 ? ld : ld + 32;
}

// Rows of memory that a tile of A needs: a product reads whole blocks of rows, so it may read beyond the tile's end.
inline int64_t tile_rows(int64_t rows) { return divide_up(rows, kRowMultiple) * kRowMultiple; }

// Vectors of the next panel, when this many are left: as many as possible, but two panels of 2 rather than 3 and 1.
inline int panel_width(int64_t vectors) { return static_cast<int>(vectors == 4 ? 2 : lesser(vectors, kPanelVectors)); }

// The depth of a packed B.
template <typename C>
inline int64_t packed_depth(int64_t depth) {
  return divide_up(depth, Packing<C>::kMultiple) * Packing<C>::kMultiple;
}

// Elements of a packed B.
template <typename C>
inline int64_t packed_size(int64_t depth, int64_t columns) {
  return packed_depth<C>(depth) * divide_up(columns, kLanes) * kLanes;
}

// Stores two vectors that are neighbours in depth, with their bfloat16 elements side by side.
inline void store_pair(BFloat16* packed, VecF low, VecF high) {
  const VecU pair = __builtin_convertvector(narrow(low), VecU) | __builtin_convertvector(narrow(high), VecU) << 16;
  memcpy(packed, &pair, sizeof pair);
}

// How many rows, or vectors of a row, ahead of its copy a weight is asked for: a panel is a small part of each row, and a
// processor does not recognise so many streams. Measured on Zen 3: products of 200 rows take 0.81 to 0.98 of the time.
constexpr int64_t kAheadInWeight = 16;

// Packs one panel of a w that is contiguous along the columns.
template <typename C>
void pack_panel_by_rows(const float* w, int64_t depth, int64_t columns, int64_t stride_k, const float* scale_k,
                        const float* scale_n, int64_t first, int width, C* packed) {
  constexpr int step = Packing<C>::kStep;
  for (int64_t k = 0; k < packed_depth<C>(depth); k += step) {
    for (int j = 0; j < width; ++j) {
      const int64_t n = first + j * kLanes;
      const int lanes = static_cast<int>(lesser(kLanes, columns - n));
      VecF row[step];
      for (int s = 0; s < step; ++s) {
        if (k + s >= depth) {
          row[s] = VecF{};
          continue;
        }
        const float* from = w + (k + s) * stride_k + n;
        prefetch(from + kAheadInWeight * stride_k);
        row[s] = lanes == kLanes ? load(from, AllLanes{}) : load(from, lanes);
        if (scale_k) row[s] *= scale_k[k + s];
        if (scale_n) row[s] *= load(scale_n + n, lanes);
      }
      if constexpr (step == 1) {
        store(packed, row[0], AllLanes{});
      } else {
        store_pair(packed, row[0], row[1]);
      }
      packed += step * kLanes;
    }
  }
}

// Packs one panel of a w that is contiguous along the depth.
template <typename C>
void pack_panel_by_columns(const float* w, int64_t depth, int64_t columns, int64_t stride_n, const float* scale_k,
                           const float* scale_n, int64_t first, int width, C* packed) {
  constexpr int step = Packing<C>::kStep;
  // this part of the panel stays in the first-level cache while columns are scattered over it
  constexpr int64_t kPart = 4 * kLanes;
  const int64_t held = width * kLanes;
  const int64_t padded = packed_depth<C>(depth);
  for (int64_t part = 0; part < padded; part += kPart) {
    const int64_t last = lesser(part + kPart, padded);
    for (int64_t n = 0; n < held; ++n) {
      const float* from = w + (first + n) * stride_n;
      const float scale = scale_n && first + n < columns ? scale_n[first + n] : 1.0f;
      for (int64_t k = part; k < last; k += kLanes) {
        const int lanes = static_cast<int>(lesser(kLanes, depth - k));
        C values[kLanes] = {};
        if (first + n < columns && k < depth) {
          VecF v = lanes == kLanes ? load(from + k, AllLanes{}) : load(from + k, lanes);
          v *= scale;
          if (scale_k) v *= load(scale_k + k, lanes);
          store(values, v, AllLanes{});
        }
        const int64_t here = lesser(kLanes, last - k);
        // element (k, n) of a panel [depth / step][column][step]
        C* to = packed + k * held + n * step;
        for (int64_t i = 0; i < here; i += step) {
          for (int s = 0; s < step; ++s) to[i * held + s] = values[i + s];
        }
      }
    }
  }
}

#if !defined(__AVX512F__)
// Vectors as columns of what they were rows of: each round takes one bit of an element's row to the end of its column.
inline void transpose(VecF (&v)[kLanes]) {
#if defined(__AVX2__)
  constexpr VecI kLow = {0, 8, 1, 9, 2, 10, 3, 11}, kHigh = {4, 12, 5, 13, 6, 14, 7, 15};
#else
  constexpr VecI kLow = {0, 4, 1, 5}, kHigh = {2, 6, 3, 7};
#endif
#pragma GCC unroll 3
  for (int round = kLanes; round > 1; round /= 2) {
    VecF next[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shuffle(v[i], v[i + kLanes / 2], kLow);
      next[2 * i + 1] = __builtin_shuffle(v[i], v[i + kLanes / 2], kHigh);
    }
    memcpy(v, next, sizeof next);
  }
}

inline void pack_panel_by_columns(const float* w, int64_t depth, int64_t columns, int64_t stride_n,
                                  const float* scale_k, const float* scale_n, int64_t first, int width, float* packed) {
  const int64_t held = width * kLanes;
  for (int64_t k = 0; k < depth; k += kLanes) {
    const int64_t here = lesser(kLanes, depth - k);
    for (int64_t n = 0; n < held; n += kLanes) {
      VecF v[kLanes];
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; ++i) {
        const int64_t column = first + n + i;
        v[i] = VecF{};
        if (column >= columns) continue;
        const float* from = w + column * stride_n + k;
        prefetch(from + kAheadInWeight * kLanes);
        v[i] = here == kLanes ? load(from, AllLanes{}) : load(from, static_cast<int>(here));
        if (scale_k) v[i] *= load(scale_k + k, static_cast<int>(here));
        if (scale_n) v[i] *= scale_n[column];
      }
      transpose(v);
      for (int i = 0; i < here; ++i) store(packed + (k + i) * held + n, v[i], AllLanes{});
    }
  }
}
#endif

template <typename C>
void pack_panel(const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n,
                const float* scale_k, const float* scale_n, int64_t first, int width, C* packed) {
  if (stride_n == 1) {
    pack_panel_by_rows(w, depth, columns, stride_k, scale_k, scale_n, first, width, packed);
  } else {
    pack_panel_by_columns(w, depth, columns, stride_n, scale_k, scale_n, first, width, packed);
  }
}

#if defined(__AMX_BF16__)
// The same for products of split floats: a panel is [depth / kTileDepth][vectors][part][pair in depth][lanes][2].
inline void pack_panel(const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n,
                       const float* scale_k, const float* scale_n, int64_t first, int width, SplitFloat* packed) {
  constexpr int64_t kPart = kSplitTile / sizeof(BFloat16);
  BFloat16* to = reinterpret_cast<BFloat16*>(packed);
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    for (int j = 0; j < width; ++j) {
      const int64_t n = first + j * kLanes;
      alignas(64) float values[kTileDepth][kLanes] = {};
      const int64_t down = lesser(kTileDepth, depth - k), across = lesser(kLanes, columns - n);
      for (int64_t r = 0; r < down; ++r) {
        const float scale = scale_k ? scale_k[k + r] : 1.0f;
        for (int64_t i = 0; i < across; ++i) values[r][i] = w[(k + r) * stride_k + (n + i) * stride_n] * scale;
      }
      VecF scale = broadcast(1.0f);
      if (scale_n) scale = load(scale_n + n, static_cast<int>(across));
      for (int r = 0; r < kTileDepth; r += 2, to += 2 * kLanes) {
        const Parts a = split(load(values[r], AllLanes{}) * scale), b = split(load(values[r + 1], AllLanes{}) * scale);
        store_pair(to, a.high, b.high);
        store_pair(to + kPart, a.middle, b.middle);
        store_pair(to + 2 * kPart, a.low, b.low);
      }
      to += (kSplitParts - 1) * kPart;
    }
  }
}
#endif

// The number of panels of a packed weight.
inline int64_t panel_count(int64_t columns) {
  int64_t count = 0;
  for (int64_t v = 0, vectors = divide_up(columns, kLanes); v < vectors; v += panel_width(vectors - v)) ++count;
  return count;
}

// Packs the panels [begin, end) of B[k][n] = w[k * stride_k + n * stride_n] * scale_k[k] * scale_n[n]. A scale that is
// null is 1; one of the strides must be 1. A panel is [depth][vectors][lanes]; for bfloat16, the two elements of a step
// in depth lie side by side.
template <typename C>
void pack(const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n, const float* scale_k,
          const float* scale_n, C* packed, int64_t begin, int64_t end) {
  const int64_t vectors = divide_up(columns, kLanes);
  int64_t v = 0;
  for (int64_t panel = 0; panel < end; ++panel) {
    const int width = panel_width(vectors - v);
    C* to = packed + v * kLanes * packed_depth<C>(depth);
    if (panel >= begin) {
      pack_panel(w, depth, columns, stride_k, stride_n, scale_k, scale_n, v * kLanes, width, to);
    }
    v += width;
  }
}

// Calls finish(j, sums) for each vector j of columns of a block. `finish` gets a copy, because a compiler that sees the
// address of the sums leave this function stores them at every step in depth.
template <int kWidth, typename Finish>
inline void finish_sums(const VecF (&sum)[kWidth][kBlockRows], const Finish& finish) {
#pragma GCC unroll 3
  for (int j = 0; j < kWidth; ++j) {
    VecF copy[kBlockRows];
#pragma GCC unroll 8
    for (int i = 0; i < kBlockRows; ++i) copy[i] = sum[j][i];
    finish(j, copy);
  }
}

// sum[j][i] = product of row i of A with vector j of columns, for one block.
template <int kWidth>
[[gnu::always_inline]] inline void sum_block(const float* a, int64_t lda, const float* b, int64_t depth,
                                             VecF (&sum)[kWidth][kBlockRows]) {
#pragma GCC unroll 8
  for (int i = 0; i < kBlockRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kWidth; ++j) sum[j][i] = VecF{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    VecF vb[kWidth];
#pragma GCC unroll 3
    for (int j = 0; j < kWidth; ++j) vb[j] = load(b + (k * kWidth + j) * kLanes, AllLanes{});
#pragma GCC unroll 8
    for (int i = 0; i < kBlockRows; ++i) {
      const VecF va = broadcast(a[i * lda + k]);
#pragma GCC unroll 3
      for (int j = 0; j < kWidth; ++j) sum[j][i] += va * vb[j];
    }
  }
}

#if !defined(__AVX512F__)
// The sums in memory. Compiled apart: the sums need 12 of 16 registers, and beside an epilogue GCC kept some of them in
// memory at every step in depth, which took four times as long.
template <int kWidth>
[[gnu::noinline]] void store_sums(const float* a, int64_t lda, const float* b, int64_t depth,
                                  VecF (&to)[kWidth][kBlockRows]) {
  VecF sum[kWidth][kBlockRows];
  sum_block<kWidth>(a, lda, b, depth, sum);
#pragma GCC unroll 3
  for (int j = 0; j < kWidth; ++j) {
#pragma GCC unroll 8
    for (int i = 0; i < kBlockRows; ++i) to[j][i] = sum[j][i];
  }
}
#endif

// Calls finish(j, sums) for each vector j of columns of one block; sums has one vector for each of its kBlockRows rows.
template <int kWidth, typename Finish>
inline void gemm_block(const float* a, int64_t lda, const float* b, int64_t depth, const Finish& finish) {
  VecF sum[kWidth][kBlockRows];
#if defined(__AVX512F__)
  sum_block<kWidth>(a, lda, b, depth, sum);
  finish_sums(sum, finish);
#else
  store_sums<kWidth>(a, lda, b, depth, sum);
  for (int j = 0; j < kWidth; ++j) finish(j, sum[j]);
#endif
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
template <int kWidth, typename Finish>
inline void gemm_block(const BFloat16* a, int64_t lda, const BFloat16* b, int64_t depth, const Finish& finish) {
  VecF sum[kWidth][kBlockRows];
#pragma GCC unroll 8
  for (int i = 0; i < kBlockRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kWidth; ++j) sum[j][i] = VecF{};
  }
  for (int64_t k = 0; k < depth; k += 2) {
    __m512i vb[kWidth];
#pragma GCC unroll 3
    for (int j = 0; j < kWidth; ++j) vb[j] = _mm512_loadu_si512(b + (k * kWidth + 2 * j) * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kBlockRows; ++i) {
      int32_t pair;
      memcpy(&pair, a + i * lda + k, sizeof pair);
      const __m512i va = _mm512_set1_epi32(pair);
#pragma GCC unroll 3
      for (int j = 0; j < kWidth; ++j) {
        sum[j][i] = (VecF)_mm512_dpbf16_ps((__m512)sum[j][i], (__m512bh)va, (__m512bh)vb[j]);
      }
    }
  }
  finish_sums(sum, finish);
}
#endif

// The end of a block at the last columns, which fill no vector: rare, so it is compiled apart from the others.
template <typename Epilogue>
[[gnu::noinline]] void finish_last(int64_t row, int count, int64_t c, int lanes, const VecF* sums,
                                   const Epilogue& epilogue) {
  epilogue(row, count, c, sums, lanes);
}

// Calls epilogue for the vector of columns at c in `count` rows from `row` on.
template <typename Epilogue>
inline void finish_block(int64_t row, int count, int64_t c, int64_t columns, const VecF* sums,
                         const Epilogue& epilogue) {
  if (c + kLanes <= columns) return epilogue(row, count, c, sums, AllLanes{});
  VecF copy[kBlockRows];  // so that only this branch needs the sums in memory
#pragma GCC unroll 8
  for (int i = 0; i < kBlockRows; ++i) copy[i] = sums[i];
  finish_last(row, count, c, static_cast<int>(columns - c), copy, epilogue);
}

#if defined(__AMX_BF16__)
// The blocks of a product, one after another. Split floats take six products: while the tile registers compute those of
// a block, vector instructions give the sums of the block before to `epilogue`.
template <typename C, typename Epilogue>
class TileBlocks {
 public:
  TileBlocks(int64_t columns, const Epilogue& epilogue) : columns_(columns), epilogue_(epilogue) {}

  // The blocks of one panel: `rows` rows of kWidth vectors from `column` on.
  template <int kWidth>
  void add_panel(const C* a, int64_t lda, const C* b, int64_t depth, int64_t rows, int64_t column) {
    for (int64_t row = 0; row < rows; row += 2 * kTileSide) {
      const Block block{a + row * lda, lda, b, depth, row, lesser(2 * kTileSide, rows - row), column, kWidth};
      if (block.rows > kTileSide) {
        add<kWidth, true>(block);
      } else {
        add<kWidth, false>(block);
      }
    }
  }

  // Gives the sums that it still has to `epilogue`.
  void finish() {
    for (int j = 0; j < last_.width; ++j) {
      for (int64_t r = 0; r < last_.rows; r += kBlockRows) {
        VecF sums[kBlockRows];
#pragma GCC unroll 8
        for (int i = 0; i < kBlockRows; ++i) sums[i] = load(sums_[buffer_][j] + (r + i) * kLanes, AllLanes{});
        const int count = static_cast<int>(lesser(kBlockRows, last_.rows - r));
        if constexpr (kSplits) mend(r, count, j, sums);
        finish_block(last_.row + r, count, last_.column + j * kLanes, columns_, sums, epilogue_);
      }
    }
    last_.width = 0;
  }

 private:
  struct Block {
    const C* a;
    int64_t lda;
    const C* b;
    int64_t depth, row, rows, column;
    int width;
  };

  template <int kWidth, bool kLower>
  void add(const Block& block) {
    multiply_block<kWidth, kLower>(block.a, block.lda, block.b, block.depth);
    finish();
    if constexpr (kSplits) buffer_ = 1 - buffer_;
    store_block<kWidth, kLower>(sums_[buffer_]);
    last_ = block;
    if constexpr (!kSplits) finish();
  }

  // Computes the sums of `count` rows of the last block, from `row` on, again where they have a NaN.
  void mend(int64_t row, int count, int j, VecF* sums) const {
    VecF total = sums[0];
#pragma GCC unroll 8
    for (int i = 1; i < kBlockRows; ++i) total += sums[i];
    if (!has_nan(total)) return;
    for (int i = 0; i < count; ++i) {
      if (!has_nan(sums[i])) continue;
      sums[i] = multiply_row(last_.a + (row + i) * last_.lda, last_.b, last_.depth, j, last_.width);
    }
  }

  static constexpr bool kSplits = sizeof(C) > sizeof(BFloat16);  // into parts, so a product overlaps the epilogue
  const int64_t columns_;
  const Epilogue& epilogue_;
  alignas(64) TileSums sums_[kSplits ? 2 : 1];
  int buffer_ = 0;
  Block last_{};
};
#endif

// Memory that is read or written soon, by address: a few ranges. A product leaves the memory idle, so each of its blocks
// asks for some lines, into the second-level cache. Measured with AVX2 on Zen 4: a chain of which each tensor has 7 MB
// takes 0.8 of the time.
class Ahead {
 public:
  Ahead() {}
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  // Adds `count` elements from p on, which may lie outside of all tensors. Null adds nothing, nor does bfloat16: see
  // kBlock.
  template <typename T>
  void add(const T* p, int64_t count) {
    if (p == nullptr || sizeof(T) < sizeof(float)) return;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    *end_++ = {reinterpret_cast<const char*>(p), bytes};
    bytes_ += bytes;
  }

  // Says in how many steps it is asked for.
  void divide(int64_t steps) { step_bytes_ = divide_up(bytes_, steps * kLine) * kLine; }

  void step() {
    int64_t left = step_bytes_;
    while (left > 0 && next_ != end_) {
      const int64_t now = lesser(left, next_->bytes);
      for (int64_t i = 0; i < now; i += kLine) __builtin_prefetch(next_->from + i, 0, 2);
      next_->from += now;
      next_->bytes -= now;
      left -= now;
      if (next_->bytes == 0) ++next_;
    }
  }

 private:
  struct Range {
    const char* from;
    int64_t bytes;
  };
  static constexpr int64_t kLine = 64;
  Range ranges_[5];
  Range *next_ = ranges_, *end_ = ranges_;
  int64_t bytes_ = 0, step_bytes_ = 0;
};

// Bytes of the tensors of a stage from which its products ask for the next tile: smaller ones are in a cache.
constexpr int64_t kAheadBytes = 2 * 1024 * 1024;

template <int kWidth, typename C, typename Epilogue>
inline void gemm_panel(const C* a, int64_t lda, const C* b, int64_t depth, int64_t rows, int64_t column,
                       int64_t columns, [[maybe_unused]] Ahead& ahead, const Epilogue& epilogue) {
#if defined(__AMX_BF16__)
  TileBlocks<C, Epilogue> blocks(columns, epilogue);
  blocks.template add_panel<kWidth>(a, lda, b, depth, rows, column);
  blocks.finish();
#else
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int count = static_cast<int>(lesser(kBlockRows, rows - row));
    ahead.step();
    gemm_block<kWidth>(a + row * lda, lda, b, depth, [&](int j, const VecF* sums) {
      finish_block(row, count, column + j * kLanes, columns, sums, epilogue);
    });
  }
#endif
}

// Calls body(Count<vectors>{}, first column, part of the packed weight) for every panel.
template <typename C, typename Body>
inline void for_each_panel(const C* packed, int64_t depth, int64_t columns, const Body& body) {
  const int64_t vectors = divide_up(columns, kLanes);
  for (int64_t v = 0; v < vectors;) {
    const int width = panel_width(vectors - v);
    const C* b = packed + v * kLanes * packed_depth<C>(depth);
    if (width == 3) {
      body(Count<3>{}, v * kLanes, b);
    } else if (width == 2) {
      body(Count<2>{}, v * kLanes, b);
    } else {
      body(Count<1>{}, v * kLanes, b);
    }
    v += width;
  }
}

// Calls body(i, sums[i]) for the first `count` rows of a block.
template <typename Body>
inline void for_each_row(int count, const VecF* sums, const Body& body) {
#pragma GCC unroll 8
  for (int i = 0; i < kBlockRows; ++i) {
    if (i >= count) break;
    body(i, sums[i]);
  }
}

// Computes C = A B, asking for `ahead` meanwhile, and calls epilogue(row, count, column, sums, lanes) for each piece of it:
// one vector of columns in `count` rows. `a` must have tile_rows(rows) rows of memory, and zeros behind its depth up to
// packed_depth.
template <typename C, typename Epilogue>
inline void gemm_tile(const C* a, int64_t lda, int64_t rows, const C* packed, int64_t depth, int64_t columns,
                      Ahead& ahead, const Epilogue& epilogue) {
  ahead.divide(panel_count(columns) * divide_up(rows, kBlockRows));
#if defined(__AMX_BF16__)
  TileBlocks<C, Epilogue> blocks(columns, epilogue);
  for_each_panel(packed, depth, columns, [&](auto width, int64_t column, const C* b) {
    blocks.template add_panel<decltype(width)::value>(a, lda, b, depth, rows, column);
  });
  blocks.finish();
#else
  for_each_panel(packed, depth, columns, [&](auto width, int64_t column, const C* b) {
    gemm_panel<decltype(width)::value>(a, lda, b, depth, rows, column, columns, ahead, epilogue);
  });
#endif
}

template <typename C, typename Epilogue>
inline void gemm_tile(const C* a, int64_t lda, int64_t rows, const C* packed, int64_t depth, int64_t columns,
                      const Epilogue& epilogue) {
  Ahead nothing;
  gemm_tile(a, lda, rows, packed, depth, columns, nothing, epilogue);
}

}  // namespace nasfast::cpu::NASFAST_ISA
