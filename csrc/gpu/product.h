// Products of matrices on tensor cores: out[m][n] = sum over k of in[m][k] w[k][n], where every row is a pixel.
//
// A block keeps its columns and goes over tiles of rows. It takes the depth in slabs: a slab of `in` is loaded into
// registers while the slab before it is multiplied. There it goes through BatchNorm and activation, once for all
// columns of the block, and then, in 16 bits, to shared memory, from which the warps read fragments. Weights are
// converted to 16 bits on the same way: once for the whole launch if they fit, otherwise slab by slab.
//
// A warp has groups of 32 columns. Within a group the columns are permuted, so that the results of a lane are 8
// neighbouring channels of a row and move as 16 bytes: column r of the j-th 8 is channel 8 (r / 2) + 2 j + r % 2.
#pragma once

#include "stages.h"

namespace nasfast::gpu::pointwise {

// What a block does with the depth. kWhole: it is one slab; kKept: the weights of all slabs are kept; kStreamed: they
// do not fit, and are loaded again for every tile of rows.
enum class Depth { kWhole, kKept, kStreamed };

NASFAST_ANYWHERE constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
// Elements between two rows in shared memory: an odd number of 16 bytes, so that 8 rows are in different banks.
NASFAST_ANYWHERE constexpr int odd_pitch(int elements) { return elements + (elements % 16 == 0 ? 8 : 0); }

// kTiles: tiles of 16 rows of a warp. kSlab: depth of a slab, 64 or 128.
template <int kTiles_, int kRowWarps_, int kColumnWarps_, int kSlab_, Depth kDepth_>
struct Tile {
  static constexpr int kTiles = kTiles_, kRowWarps = kRowWarps_, kColumnWarps = kColumnWarps_, kSlab = kSlab_;
  static constexpr Depth kDepth = kDepth_;
  static constexpr bool kStream = kDepth == Depth::kStreamed;
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kRows = 16 * kTiles * kRowWarps, kColumns = 32 * kColumnWarps;
  // pieces of 16 bytes of a slab that a thread moves, of `in` and of the weights
  static constexpr int kPieces = divide_up(kRows * kSlab / 8, kThreads);
  static constexpr int kWeightPieces = divide_up(kColumns * kSlab / 8, kThreads);
  static constexpr int kPitch = odd_pitch(kSlab), kInBuffer = kRows * kPitch;
};

struct alignas(16) Floats {
  float v[4];
};

// What a product reads besides `in`.
struct Factor {
  int64_t rows;
  int depth, columns;  // multiples of 8
  Weight weight;       // kTransposed: [depth][columns], otherwise [columns][depth]
};

// Shared memory of a block: two slabs of `in`, the weights, `planes` numbers for each k and `column_planes` for each
// column.
template <class Tile, bool kTransposed>
struct Memory {
  int pitch;        // elements between two rows of the weights
  int weight_slab;  // elements between two slabs of them
  int weights_at, planes_at, columns_at, bytes;

  NASFAST_ANYWHERE Memory(int depth, int planes, int column_planes) {
    constexpr int kSlab = Tile::kSlab;
    pitch = kTransposed ? Tile::kColumns + 8 : (Tile::kStream ? Tile::kPitch : odd_pitch(depth));
    weight_slab = kTransposed ? kSlab * pitch : (Tile::kStream ? Tile::kColumns * pitch : kSlab);
    const int weights = Tile::kStream ? 2 * weight_slab : (kTransposed ? depth : Tile::kColumns) * pitch;
    weights_at = 2 * Tile::kInBuffer * 2;
    planes_at = weights_at + weights * 2;
    columns_at = planes_at + planes * depth * 4;
    bytes = columns_at + column_planes * Tile::kColumns * 4;
  }
};

// The pieces of 16 bytes that a thread moves: place `piece` of rows `row`, `row + step`, ...
struct Share {
  int row, piece, step;

  NASFAST_DEVICE static Share of(int thread, int threads, int pieces) {
    const int step = threads / pieces, row = thread / pieces;
    return {row < step ? row : 1 << 16, thread - row * pieces, step};
  }
};

// Pieces of a row of a slab, and the distance between the rows of a thread: known to the compiler where slabs are many.
template <class Tile>
NASFAST_DEVICE int row_pieces(int depth) {
  return Tile::kDepth == Depth::kWhole && depth < Tile::kSlab ? depth / 8 : Tile::kSlab / 8;
}
template <class Tile>
NASFAST_DEVICE int rows_at_once(const Share& share) {
  return Tile::kDepth == Depth::kWhole ? share.step : 8 * Tile::kThreads / Tile::kSlab;
}

// Loads the weights of a slab, rounds them to 16 bits and stores them to shared memory.
template <class Format, class Tile, bool kTransposed>
struct Weights {
  Factor factor;
  int first_column;

  using Raw = Vec4[Tile::kWeightPieces][2];

  // Rows in memory are columns, or, transposed, the depth. The pieces of a row are known to the compiler, except where
  // the depth is one slab, which may be narrow.
  NASFAST_DEVICE Share share(int thread) const {
    if (kTransposed) return Share::of(thread, Tile::kThreads, Tile::kColumns / 8);
    return Share::of(thread, Tile::kThreads, row_pieces<Tile>(factor.depth));
  }
  template <class F>
  NASFAST_DEVICE void pieces(const Share& share, int slab, const F& f) const {
    const int left = factor.depth - slab * Tile::kSlab, deep = left < Tile::kSlab ? left : Tile::kSlab;
    const int columns = factor.columns - first_column;
    const int step = kTransposed ? 8 * Tile::kThreads / Tile::kColumns : rows_at_once<Tile>(share);
    NASFAST_UNROLL
    for (int i = 0; i < Tile::kWeightPieces; ++i) {
      const int row = share.row + i * step, k = kTransposed ? row : 8 * share.piece;
      const int n = kTransposed ? 8 * share.piece : row;
      // columns behind the last are left as they are: nothing reads their results
      if (k < deep && n < columns && n < Tile::kColumns) f(i, k, n);
    }
  }
  NASFAST_DEVICE void load(const Share& share, int slab, Raw& raw) const {
    pieces(share, slab, [&](int i, int k, int n) {
      const int row = kTransposed ? slab * Tile::kSlab + k : first_column + n;
      const int at =
          kTransposed ? row * factor.columns + first_column + n : row * factor.depth + slab * Tile::kSlab + k;
      if (factor.weight.is_float) {
        const Vec4* from = reinterpret_cast<const Vec4*>(static_cast<const float*>(factor.weight.data) + at);
        raw[i][0] = from[0];
        raw[i][1] = from[1];
      } else {
        raw[i][0] = *reinterpret_cast<const Vec4*>(static_cast<const uint16_t*>(factor.weight.data) + at);
      }
    });
  }
  NASFAST_DEVICE void store(const Share& share, int slab, const Raw& raw, int pitch, uint16_t* to) const {
    pieces(share, slab, [&](int i, int k, int n) {
      Vec4 v = raw[i][0];
      if (factor.weight.is_float) {
        NASFAST_UNROLL
        for (int j = 0; j < 4; ++j) {
          const Vec4& half = raw[i][j / 2];
          v.v[j] = Format::pack(as_float(half.v[2 * (j % 2)]), as_float(half.v[2 * (j % 2) + 1]));
        }
      }
      const int group = n & ~31, c = n % 32;
      if (kTransposed) {
        NASFAST_UNROLL
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<uint32_t*>(to + k * pitch + group + 8 * j + c / 4) = v.v[j];
        }
      } else {
        *reinterpret_cast<Vec4*>(to + (group + c % 8 / 2 * 8 + c / 8 * 2 + c % 2) * pitch + k) = v;
      }
    });
  }
};

// acc += in w for a slab of `deep` channels, by one warp.
template <class Format, class Tile, bool kTransposed, class Acc>
NASFAST_DEVICE void multiply_slab(const Warp& warp, const uint16_t* in, const uint16_t* weights, int pitch, int deep,
                                  Acc& acc) {
  constexpr int kTiles = Tile::kTiles;
  const int column = warp.index % Tile::kColumnWarps * 32;
  const uint16_t* a_from = in + warp.index / Tile::kColumnWarps * 16 * kTiles * Tile::kPitch;
  const auto a_at = [&](int lane, int i, int k) {
    return a_from + (16 * i + lane % 16) * Tile::kPitch + lane / 16 * 8 + k;
  };
  // of two neighbouring tiles of 8 columns: matrices (j, k), (j, k + 8), (j + 1, k), (j + 1, k + 8)
  const auto b_at = [&](int lane, int j, int k) {
    const int m = lane / 8, n = column + 8 * (j + m / 2), deeper = k + m % 2 * 8;
    return weights + (kTransposed ? (deeper + lane % 8) * pitch + n : (n + lane % 8) * pitch + deeper);
  };
  const auto load_b = [&](const auto& to, const auto& at) {
    if constexpr (kTransposed) {
      warp.load_transposed(to, at);
    } else {
      warp.load_matrices(to, at);
    }
  };
  const auto first = [&](int lane) { return 32 * warp.index + lane; };
  NASFAST_UNROLL
  for (int k = 0; k < Tile::kSlab; k += 16) {
    if (k + 16 > deep) break;
    Local<uint32_t[kTiles][4]> a(warp);
    Local<uint32_t[2][4]> b(warp);
    NASFAST_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      warp.load_matrices([&](int lane) -> auto& { return a[lane][i]; }, [&](int lane) { return a_at(lane, i, k); });
    }
    NASFAST_UNROLL
    for (int j = 0; j < 2; ++j) {
      load_b([&](int lane) -> auto& { return b[lane][j]; }, [&](int lane) { return b_at(lane, 2 * j, k); });
    }
    NASFAST_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      NASFAST_UNROLL
      for (int j = 0; j < 4; ++j) {
        warp.template multiply_16<Format>([&](int lane) -> auto& { return acc[first(lane)][i][j]; },
                                          [&](int lane) -> auto& { return a[lane][i]; },
                                          [&](int lane) { return b[lane][j / 2] + 2 * (j % 2); });
      }
    }
  }
  if (deep % 16 == 0) return;
  const int k = deep - 8;
  Local<uint32_t[4]> a(warp), b(warp);
  // the rows of both tiles of 16, and the four tiles of 8 columns
  warp.load_matrices([&](int lane) -> auto& { return a[lane]; },
                     [&](int lane) { return a_from + lane % (16 * kTiles) * Tile::kPitch + k; });
  load_b([&](int lane) -> auto& { return b[lane]; },
         [&](int lane) {
           const int n = column + lane / 8 * 8;
           return weights + (kTransposed ? (k + lane % 8) * pitch + n : (n + lane % 8) * pitch + k);
         });
  NASFAST_UNROLL
  for (int i = 0; i < kTiles; ++i) {
    NASFAST_UNROLL
    for (int j = 0; j < 4; ++j) {
      warp.template multiply_8<Format>([&](int lane) -> auto& { return acc[first(lane)][i][j]; },
                                       [&](int lane) { return a[lane] + 2 * i; },
                                       [&](int lane) { return b[lane] + j; });
    }
  }
}

// Goes over the tiles of rows of a block. `source` converts `in`, of which it has kInputs tensors.
template <class Format, class Tile, bool kTransposed, class Source>
struct RowProduct {
  static constexpr int kSlab = Tile::kSlab;
  const Factor& factor;
  const Source& source;
  const Memory<Tile, kTransposed>& memory;
  unsigned char* shared;
  Weights<Format, Tile, kTransposed> weights;

  // What a thread keeps of the slab that comes next.
  struct Thread {
    Share share, weight_share;
    int channel;                        // the first of a piece of `in`, in the slab
    int to;                             // bytes before the first piece, in shared memory
    const char* from[Source::kInputs];  // the first piece
    Vec4 in[Tile::kPieces][Source::kInputs];
  };
  struct WeightThread {
    typename Weights<Format, Tile, kTransposed>::Raw raw;
  };
  NASFAST_DEVICE uint16_t* in_slab(int buffer) const {
    return reinterpret_cast<uint16_t*>(shared) + buffer * Tile::kInBuffer;
  }
  NASFAST_DEVICE uint16_t* weight_slab(int slab) const {
    return reinterpret_cast<uint16_t*>(shared + memory.weights_at) + slab * memory.weight_slab;
  }
  NASFAST_DEVICE float* planes() const { return reinterpret_cast<float*>(shared + memory.planes_at); }
  NASFAST_DEVICE int slabs() const { return Tile::kDepth == Depth::kWhole ? 1 : divide_up(factor.depth, kSlab); }
  NASFAST_DEVICE int tiles() const { return static_cast<int>((factor.rows + Tile::kRows - 1) / Tile::kRows); }
  NASFAST_DEVICE int rows_of(int tile) const {
    return tile + 1 == tiles() ? static_cast<int>(factor.rows - int64_t{tile} * Tile::kRows) : Tile::kRows;
  }
  NASFAST_DEVICE int pieces() const {  // of a thread
    return divide_up(Tile::kRows, Tile::kThreads / row_pieces<Tile>(factor.depth));
  }
  // Calls f(i, rows between it and the first) for the pieces of a thread in the first `rows` rows of a tile.
  template <class F>
  NASFAST_DEVICE void each_piece(const Thread& t, int rows, const F& f) const {
    const int step = rows_at_once<Tile>(t.share), left = rows - t.share.row;
    NASFAST_UNROLL
    for (int i = 0; i < Tile::kPieces; ++i) {
      if (i * step < left) f(i, i * step);
    }
  }

  template <class Block>
  NASFAST_DEVICE void begin(const Block& block, Local<Thread>& threads, Local<WeightThread>& weight_threads) const {
    block.each([&](int thread) {
      const Share share = Share::of(thread, Tile::kThreads, row_pieces<Tile>(factor.depth));
      Thread& t = threads[thread];
      t.share = share;
      t.channel = 8 * share.piece;
      NASFAST_UNROLL
      for (int n = 0; n < Source::kInputs; ++n) {
        const int64_t row = int64_t{block.x} * Tile::kRows + share.row;
        t.from[n] = reinterpret_cast<const char*>(source.in[n] + row * factor.depth + t.channel);
      }
      t.to = 2 * (share.row * Tile::kPitch + t.channel);
      t.weight_share = weights.share(thread);
      source.template prepare<Tile::kThreads>(thread, factor.depth, planes());
    });
    if (Tile::kStream) return;
    NASFAST_NO_UNROLL
    for (int slab = 0; slab < slabs(); ++slab) {
      block.each([&](int thread) {
        const Share& s = threads[thread].weight_share;
        weights.load(s, slab, weight_threads[thread].raw);
        weights.store(s, slab, weight_threads[thread].raw, memory.pitch, weight_slab(slab));
      });
    }
  }
  // Begins to load a slab into registers, and goes `step` bytes on to the one that follows.
  template <class Block>
  NASFAST_DEVICE void load(const Block& block, int rows, int slab, int64_t step, Local<Thread>& threads,
                           Local<WeightThread>& weight_threads) const {
    const int row_bytes = 2 * factor.depth;
    block.each([&](int thread) {
      Thread& t = threads[thread];
      const bool inside = Tile::kDepth == Depth::kWhole || slab * kSlab + t.channel < factor.depth;
      NASFAST_UNROLL
      for (int n = 0; n < Source::kInputs; ++n) {
        each_piece(t, inside ? rows : 0, [&](int i, int row) {
          t.in[i][n] = *reinterpret_cast<const Vec4*>(t.from[n] + int64_t{row} * row_bytes);
        });
        t.from[n] += step;
      }
      if (Tile::kStream) weights.load(t.weight_share, slab, weight_threads[thread].raw);
    });
  }
  // Converts what load() has loaded and stores it to shared memory.
  template <class Block>
  NASFAST_DEVICE void store(const Block& block, int slab, int buffer, int pieces, Local<Thread>& threads,
                            Local<WeightThread>& weight_threads) const {
    block.each([&](int thread) {
      Thread& t = threads[thread];
      const int c = slab * kSlab + t.channel;
      if (Tile::kDepth == Depth::kWhole || c < factor.depth) {
        source.template convert<Format>(t.in, pieces, planes(), factor.depth, c);
        unsigned char* to = reinterpret_cast<unsigned char*>(in_slab(buffer)) + t.to;
        const auto put = [&](int i, int row) { *reinterpret_cast<Vec4*>(to + 2 * row * Tile::kPitch) = t.in[i][0]; };
        each_piece(t, Tile::kRows, put);
      }
      if (Tile::kStream) {
        weights.store(t.weight_share, slab, weight_threads[thread].raw, memory.pitch, weight_slab(buffer));
      }
    });
  }

  // ahead(tile, rows) loads what the results of a tile need, and write(warp, tile, rows, acc) uses them; rows: of the
  // tile. acc[thread][i][j][2 h + e] is row 16 i + 8 h + lane / 4 of the warp and channel 8 (lane % 4) + 2 j + e of its
  // group of columns.
  template <class Block, class Ahead, class Write>
  NASFAST_DEVICE void run(const Block& block, const Ahead& ahead, const Write& write) const {
    const int tiles = this->tiles(), slabs = this->slabs(), pieces = this->pieces();
    // bytes from the last slab of a tile to the first of the next
    const int64_t next_tile =
        int64_t{2} * Tile::kRows * block.count_x * factor.depth - int64_t{2} * kSlab * (slabs - 1);
    Local<Thread> threads(block);
    Local<WeightThread> weight_threads(block);
    Local<float[Tile::kTiles][4][4]> acc(block);
    const auto clear = [](float (&sums)[Tile::kTiles][4][4]) {
      NASFAST_UNROLL
      for (int i = 0; i < 16 * Tile::kTiles; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0;
    };
    begin(block, threads, weight_threads);
    load(block, rows_of(block.x), 0, slabs == 1 ? next_tile : 2 * kSlab, threads, weight_threads);
    block.each([&](int thread) { clear(acc[thread]); });
    block.sync();

    int buffer = 0;
    NASFAST_NO_UNROLL
    for (int tile = block.x; tile < tiles; tile += block.count_x) {
      const int rows = rows_of(tile);
      NASFAST_NO_UNROLL
      for (int slab = 0; slab < slabs; ++slab, buffer ^= 1) {
        const bool last = Tile::kDepth == Depth::kWhole || slab + 1 == slabs;
        store(block, slab, buffer, pieces, threads, weight_threads);
        // this buffer was read two turns ago, and everyone has passed the barrier of the turn between
        block.sync();
        if (last) ahead(tile, rows);
        const int next = last ? tile + block.count_x : tile, next_slab = last ? 0 : slab + 1;
        if (next < tiles) {
          const int64_t step = next_slab + 1 == slabs ? next_tile : 2 * kSlab;
          load(block, rows_of(next), next_slab, step, threads, weight_threads);
        }
        const int left = factor.depth - slab * kSlab, deep = left < kSlab ? left : kSlab;
        block.warps([&](const Warp& warp) {
          multiply_slab<Format, Tile, kTransposed>(warp, in_slab(buffer), weight_slab(Tile::kStream ? buffer : slab),
                                                   memory.pitch, deep, acc);
          if (!last) return;
          write(warp, tile, rows, acc);
          warp.each([&](int lane) { clear(acc[32 * warp.index + lane]); });
        });
      }
    }
    block.sync();
  }
};

}  // namespace nasfast::gpu::pointwise
