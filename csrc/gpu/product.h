// Products of matrices on tensor cores: out[m][n] = sum over k of in[m][k] w[k][n], where every row is a pixel.
//
// A block keeps its columns and goes over tiles of rows. It takes the depth in slabs: a slab of `in` is loaded into
// registers while the slab before it is multiplied. There it goes through BatchNorm and activation, once for all
// columns of the block, and then, in 16 bits, to shared memory, from which the warps read fragments. Weights are
// converted to 16 bits on the way: once for the whole launch if they fit, otherwise slab by slab.
//
// A warp has groups of 32 columns. Within a group the columns are permuted, so that the results of a lane are 8
// neighbouring channels of a row and move as 16 bytes: column r of the j-th 8 is channel 8 (r / 2) + 2 j + r % 2.
#pragma once

#include "stages.h"

namespace nasfast::gpu::pointwise {

// What a block does with the depth. kWhole: the depth is one slab. kKept: the block keeps the weights of all slabs.
// kStreamed: the weights do not fit, or a block has one tile of rows only; they are loaded slab by slab, for every tile
// again.
enum class Depth { kWhole, kKept, kStreamed };

// Elements between two rows in shared memory: an odd number of 16 bytes, so that 8 rows are in different banks.
NASFAST_ANYWHERE constexpr int odd_pitch(int elements) { return elements + (elements % 16 == 0 ? 8 : 0); }

// kTiles: tiles of 16 rows that a warp has. kSlab: depth of a slab. kBlocks: blocks per multiprocessor that registers are
// kept for.
template <int kTiles_, int kRowWarps_, int kColumnWarps_, int kSlab_, Depth kDepth_, int kBlocks_>
struct Tile {
  static constexpr int kTiles = kTiles_, kRowWarps = kRowWarps_, kColumnWarps = kColumnWarps_, kSlab = kSlab_;
  static constexpr bool kStream = kDepth_ == Depth::kStreamed, kWhole = kDepth_ == Depth::kWhole;
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kRows = 16 * kTiles * kRowWarps, kColumns = 32 * kColumnWarps;
  static constexpr int kPitch = odd_pitch(kSlab), kInBuffer = kRows * kPitch;
};

// How threads share the pieces of 16 bytes of rows in memory: each has the same piece of the rows `row`, `row + kStep`
// and so on, kMost of them at most.
template <int kThreads, int kRows, int kPieces>
struct Share {
  static_assert(kThreads % kPieces == 0, "a thread has the same piece of every row");
  static constexpr int kStep = kThreads / kPieces, kMost = divide_up(kRows, kStep);

  static NASFAST_DEVICE int row(int thread) { return thread / kPieces; }
  static NASFAST_DEVICE int piece(int thread) { return thread % kPieces; }
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

// Loads the weights slab by slab, rounds them to 16 bits and stores them to shared memory. A row in global memory is a
// column of the product, or, if transposed, one place of the depth.
template <class Format, class Tile, bool kTransposed>
struct Weights {
  // depth of a slab of the weights; weights that are kept need no slab to be as deep as those of `in`
  static constexpr int kDeep = Tile::kStream || Tile::kSlab < 64 ? Tile::kSlab : 64;
  using Threads =
      Share<Tile::kThreads, kTransposed ? kDeep : Tile::kColumns, (kTransposed ? Tile::kColumns : kDeep) / 8>;
  Factor factor;
  int first_column;

  // What a thread keeps of the slab that comes next.
  struct Thread {
    const char* from;  // where its first piece is
    Vec4 raw[Threads::kMost][2];
  };

  NASFAST_DEVICE int size() const { return factor.weight.is_float ? 4 : 2; }
  NASFAST_DEVICE int pitch() const { return kTransposed ? factor.columns : factor.depth; }
  // Bytes from one slab to the next.
  NASFAST_DEVICE int64_t slab_step() const { return int64_t{kDeep * size()} * (kTransposed ? factor.columns : 1); }

  NASFAST_DEVICE void begin(int thread, Thread& t) const {
    const int row = Threads::row(thread), piece = 8 * Threads::piece(thread);
    const int at =
        kTransposed ? row * factor.columns + first_column + piece : (first_column + row) * factor.depth + piece;
    t.from = static_cast<const char*>(factor.weight.data) + int64_t{at} * size();
  }
  // Number of rows of a slab from the thread's first row on, if `deep` places of the depth are left. Columns behind the
  // last stay as they are, because nothing reads their results.
  NASFAST_DEVICE int rows_left(int thread, int deep) const {
    const int columns = factor.columns - first_column;
    const int across = kTransposed ? columns : deep, along = kTransposed ? deep : columns;
    constexpr int kAlong = kTransposed ? kDeep : Tile::kColumns;
    return 8 * Threads::piece(thread) < across ? (along < kAlong ? along : kAlong) - Threads::row(thread) : 0;
  }
  // half: which of two slabs of 16-bit weights a thread keeps at once.
  NASFAST_DEVICE void load(int thread, int deep, Thread& t, int half = 0) const {
    const int rows = this->rows_left(thread, deep);
    const int64_t step = int64_t{Threads::kStep * size()} * pitch();
    const char* from = t.from;
    if (factor.weight.is_float) {
      NASFAST_UNROLL
      for (int i = 0; i < Threads::kMost; ++i, from += step) {
        if (i * Threads::kStep >= rows) continue;
        t.raw[i][0] = reinterpret_cast<const Vec4*>(from)[0];
        t.raw[i][1] = reinterpret_cast<const Vec4*>(from)[1];
      }
    } else {
      NASFAST_UNROLL
      for (int i = 0; i < Threads::kMost; ++i, from += step) {
        if (i * Threads::kStep < rows) t.raw[i][half] = *reinterpret_cast<const Vec4*>(from);
      }
    }
  }
  NASFAST_DEVICE void store(int thread, int deep, Thread& t, int pitch, uint16_t* to, int half = 0) const {
    if (factor.weight.is_float) {
      NASFAST_UNROLL
      for (int i = 0; i < Threads::kMost; ++i) {
        NASFAST_UNROLL
        for (int j = 0; j < 4; ++j) {
          const uint32_t* pair = t.raw[i][j / 2].v + 2 * (j % 2);
          const uint32_t both = Format::pack(as_float(pair[0]), as_float(pair[1]));
          t.raw[i][0].v[j] = both;  // what is overwritten has been read
        }
      }
    }
    const int rows = this->rows_left(thread, deep), piece = 8 * Threads::piece(thread), row = Threads::row(thread);
    NASFAST_UNROLL
    for (int i = 0; i < Threads::kMost; ++i) {
      if (i * Threads::kStep >= rows) continue;
      const Vec4& v = t.raw[i][half];
      if (kTransposed) {
        uint16_t* here = to + (row + i * Threads::kStep) * pitch + place(piece);
        NASFAST_UNROLL
        for (int j = 0; j < 4; ++j) *reinterpret_cast<uint32_t*>(here + 8 * j) = v.v[j];
      } else {
        // place() moves bits, and the row of a thread has none of those of a step that is a power of two
        constexpr bool kBits = (Threads::kStep & (Threads::kStep - 1)) == 0;
        const int column = kBits ? place(row) + place(i * Threads::kStep) : place(row + i * Threads::kStep);
        *reinterpret_cast<Vec4*>(to + column * pitch + piece) = v;
      }
    }
  }

 private:
  // Where a column is in shared memory.
  static NASFAST_DEVICE int place(int column) {
    return (column & ~31) + (column >> 1 & 3) * 8 + (column >> 3 & 3) * 2 + (column & 1);
  }
};

// One warp's share of acc += in w for a slab of `deep` channels.
template <class Format, class Tile, bool kTransposed, class Acc>
struct SlabProduct {
  static constexpr int kTiles = Tile::kTiles;
  const Warp& warp;
  const uint16_t *in, *weights;  // the slab
  int pitch;                     // of the weights
  Acc& acc;

  NASFAST_DEVICE int column() const { return warp.index % Tile::kColumnWarps * 32; }
  NASFAST_DEVICE const uint16_t* rows() const {
    return in + warp.index / Tile::kColumnWarps * 16 * kTiles * Tile::kPitch;
  }
  template <class To, class At>
  NASFAST_DEVICE void load_b(const To& to, const At& at) const {
    if constexpr (kTransposed) {
      warp.load_transposed(to, at);
    } else {
      warp.load_matrices(to, at);
    }
  }

  NASFAST_DEVICE void run(int deep) const {
    if (deep >= Tile::kSlab) {
      NASFAST_UNROLL
      for (int k = 0; k < Tile::kSlab; k += 16) multiply_16(k);
      return;
    }
    NASFAST_UNROLL
    for (int k = 0; k < Tile::kSlab; k += 16) {
      if (k + 16 > deep) break;
      multiply_16(k);
    }
    if (deep % 16 != 0) multiply_8(deep - 8);
  }
  NASFAST_DEVICE void multiply_16(int k) const {
    Local<uint32_t[kTiles][4]> a(warp);
    Local<uint32_t[2][4]> b(warp);
    NASFAST_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      warp.load_matrices(
          [&](int lane) -> auto& { return a[lane][i]; },
          [&](int lane) { return rows() + lane % 16 * Tile::kPitch + lane / 16 * 8 + 16 * i * Tile::kPitch + k; });
    }
    // one load has the matrices (j, k), (j, k + 8), (j + 1, k), (j + 1, k + 8) of the tiles j and j + 1 of 8 columns
    NASFAST_UNROLL
    for (int j = 0; j < 2; ++j) {
      load_b([&](int lane) -> auto& { return b[lane][j]; },
             [&](int lane) {
               const int n = column() + lane / 16 * 8, deeper = lane / 8 % 2 * 8;
               return kTransposed ? weights + (deeper + lane % 8) * pitch + n + k * pitch + 16 * j
                                  : weights + (n + lane % 8) * pitch + deeper + 16 * j * pitch + k;
             });
    }
    NASFAST_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      NASFAST_UNROLL
      for (int j = 0; j < 4; ++j) {
        warp.template multiply_16<Format>([&](int lane) -> auto& { return acc[32 * warp.index + lane][i][j]; },
                                          [&](int lane) -> auto& { return a[lane][i]; },
                                          [&](int lane) { return b[lane][j / 2] + 2 * (j % 2); });
      }
    }
  }
  NASFAST_DEVICE void multiply_8(int k) const {
    static_assert(kTiles <= 2, "one load has the rows of all tiles");
    Local<uint32_t[4]> a(warp), b(warp);
    // the rows of both tiles of 16, and the four tiles of 8 columns
    warp.load_matrices([&](int lane) -> auto& { return a[lane]; },
                       [&](int lane) { return rows() + lane % (16 * kTiles) * Tile::kPitch + k; });
    load_b([&](int lane) -> auto& { return b[lane]; },
           [&](int lane) {
             const int n = column() + lane / 8 * 8;
             return weights + (kTransposed ? (k + lane % 8) * pitch + n : (n + lane % 8) * pitch + k);
           });
    NASFAST_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      NASFAST_UNROLL
      for (int j = 0; j < 4; ++j) {
        warp.template multiply_8<Format>([&](int lane) -> auto& { return acc[32 * warp.index + lane][i][j]; },
                                         [&](int lane) { return a[lane] + 2 * i; },
                                         [&](int lane) { return b[lane] + j; });
      }
    }
  }
};

// Goes over the tiles of rows of a block. `source` converts `in`, of which it has kInputs tensors, and leaves out those
// that are not there. With kWritesInput it also writes what it converts, as the first input of a chain.
template <class Format, class Tile, bool kTransposed, class Source>
struct RowProduct {
  static constexpr int kSlab = Tile::kSlab;
  using Threads = Share<Tile::kThreads, Tile::kRows, kSlab / 8>;
  using Acc = float[Tile::kTiles][4][4];
  const Factor& factor;
  const Source& source;
  const Memory<Tile, kTransposed>& memory;
  unsigned char* shared;
  Weights<Format, Tile, kTransposed> weights;

  // What a thread keeps of the slab that comes next.
  struct Thread {
    const char* from[Source::kInputs];  // its first piece
    Vec4 in[Threads::kMost][Source::kInputs];
    typename Weights<Format, Tile, kTransposed>::Thread weights;
  };
  NASFAST_DEVICE uint16_t* in_slab(int buffer) const {
    return reinterpret_cast<uint16_t*>(shared) + buffer * Tile::kInBuffer;
  }
  NASFAST_DEVICE uint16_t* weight_slab(int slab) const {
    return reinterpret_cast<uint16_t*>(shared + memory.weights_at) + slab * memory.weight_slab;
  }
  NASFAST_DEVICE float* planes() const { return reinterpret_cast<float*>(shared + memory.planes_at); }
  NASFAST_DEVICE int slabs() const { return Tile::kWhole ? 1 : divide_up(factor.depth, kSlab); }

  // A slab of a tile of rows.
  struct Place {
    int tile, rows;  // of the tile
    int deep;        // the rest of the depth

    NASFAST_DEVICE bool last() const { return Tile::kWhole || deep <= kSlab; }
  };
  // What is the same for all slabs of a block.
  struct Tiling {
    int tiles, last;  // tiles of all blocks, and the rows of the last one
    int64_t to_tile;  // bytes from the last slab to the next tile of this block in `in`
    int64_t to_top;   // bytes from the last slab to the first in the weights

    NASFAST_DEVICE int rows(int tile) const { return tile + 1 == tiles ? last : Tile::kRows; }
  };
  NASFAST_DEVICE Tiling tiling(int row_blocks) const {
    const int tiles = static_cast<int>((factor.rows + Tile::kRows - 1) / Tile::kRows), more = slabs() - 1;
    return {tiles, static_cast<int>(factor.rows - int64_t{tiles - 1} * Tile::kRows),
            int64_t{2} * Tile::kRows * row_blocks * factor.depth - int64_t{2} * kSlab * more,
            -more * weights.slab_step()};
  }

  // Brings the weights that a block keeps to shared memory, or begins to load their first slab.
  template <class Block>
  NASFAST_DEVICE void begin(const Block& block, const Tiling& tiling, const Place& at, Local<Thread>& threads) const {
    block.each([&](int thread) {
      Thread& t = threads[thread];
      NASFAST_UNROLL
      for (int n = 0; n < Source::kInputs; ++n) {
        if (!source.has(n)) continue;
        const int64_t row = int64_t{block.x} * Tile::kRows + Threads::row(thread);
        t.from[n] = reinterpret_cast<const char*>(source.in[n] + row * factor.depth + 8 * Threads::piece(thread));
      }
      weights.begin(thread, t.weights);
    });
    if (Tile::kStream) {
      load_weights(block, tiling, at, threads);
    } else {
      // a round waits for memory once, and the registers of a float have room for two slabs of 16-bit weights
      constexpr int kDeep = Weights<Format, Tile, kTransposed>::kDeep, kHalves = Tile::kWhole ? 1 : 2;
      const int round = factor.weight.is_float ? kDeep : kHalves * kDeep;
      NASFAST_NO_UNROLL
      for (int k = 0; k < factor.depth; k += round) {
        block.each([&](int thread) {
          auto& thread_weights = threads[thread].weights;
          NASFAST_UNROLL
          for (int half = 0; half < kHalves; ++half) {
            if (half * kDeep >= round) continue;
            weights.load(thread, factor.depth - k - half * kDeep, thread_weights, half);
            thread_weights.from += weights.slab_step();
          }
          NASFAST_UNROLL
          for (int half = 0; half < kHalves; ++half) {
            if (half * kDeep >= round) continue;
            weights.store(thread, factor.depth - k - half * kDeep, thread_weights, memory.pitch,
                          weight_slab(0) + (k + half * kDeep) * (memory.weight_slab / kSlab), half);
          }
        });
      }
    }
  }
  // Begins to load a slab of `in` into registers.
  template <class Block>
  NASFAST_DEVICE void load_in(const Block& block, const Tiling& tiling, const Place& at, Local<Thread>& threads) const {
    const int64_t row_step = int64_t{2} * Threads::kStep * factor.depth;
    block.each([&](int thread) {
      Thread& t = threads[thread];
      const int rows = 8 * Threads::piece(thread) < at.deep ? at.rows - Threads::row(thread) : 0;
      NASFAST_UNROLL
      for (int n = 0; n < Source::kInputs; ++n) {
        if (!source.has(n)) continue;
        const char* from = t.from[n];
        NASFAST_UNROLL
        for (int i = 0; i < Threads::kMost; ++i, from += row_step) {
          if (i * Threads::kStep < rows) t.in[i][n] = *reinterpret_cast<const Vec4*>(from);
        }
        t.from[n] += at.last() ? tiling.to_tile : 2 * kSlab;
      }
    });
  }
  // The same of the weights.
  template <class Block>
  NASFAST_DEVICE void load_weights(const Block& block, const Tiling& tiling, const Place& at,
                                   Local<Thread>& threads) const {
    block.each([&](int thread) {
      Thread& t = threads[thread];
      weights.load(thread, at.deep, t.weights);
      t.weights.from += at.last() ? tiling.to_top : weights.slab_step();
    });
  }
  // Converts what load() has loaded and stores it to shared memory.
  template <class Block>
  NASFAST_DEVICE void store(const Block& block, const Place& at, int buffer, Local<Thread>& threads) const {
    block.each([&](int thread) {
      Thread& t = threads[thread];
      const int channel = 8 * Threads::piece(thread), row = Threads::row(thread);
      if (channel < at.deep) {
        source.template convert<Format>(t.in, planes(), factor.depth, factor.depth - at.deep + channel);
        uint16_t* to = in_slab(buffer) + row * Tile::kPitch + channel;
        NASFAST_UNROLL
        for (int i = 0; i < Threads::kMost; ++i) {
          if (Tile::kRows % Threads::kStep != 0 && row + i * Threads::kStep >= Tile::kRows) continue;
          *reinterpret_cast<Vec4*>(to + i * Threads::kStep * Tile::kPitch) = t.in[i][0];
        }
        // all groups of columns convert the same rows, and one of them writes
        if constexpr (Source::kWritesInput) {
          if (block.y == 0) write_input(at, row, factor.depth - at.deep + channel, t);
        }
      }
      if (Tile::kStream) weights.store(thread, at.deep, t.weights, memory.pitch, weight_slab(buffer));
    });
  }

  // Writes the pieces of a thread, of channels c to c + 7, in rows that the tile has.
  NASFAST_DEVICE void write_input(const Place& at, int row, int c, const Thread& t) const {
    uint16_t* to = source.x + (int64_t{at.tile} * Tile::kRows + row) * factor.depth + c;
    const int64_t step = int64_t{Threads::kStep} * factor.depth;
    NASFAST_UNROLL
    for (int i = 0; i < Threads::kMost; ++i, to += step) {
      if (row + i * Threads::kStep < at.rows) *reinterpret_cast<Vec4*>(to) = t.in[i][0];
    }
  }

  // prepare_results() prepares what they need of each channel. ahead(tile, rows) loads what those of a tile need, and
  // write(warp, tile, rows, acc) uses it; rows: of the tile. acc[thread][i][j][2 h + e] is row 16 i + 8 h + lane / 4 of
  // the warp and channel 8 (lane % 4) + 2 j + e of its group of columns.
  template <class Block, class PrepareResults, class Ahead, class Write>
  NASFAST_DEVICE void run(const Block& block, const PrepareResults& prepare_results, const Ahead& ahead,
                          const Write& write) const {
    const Tiling tiling = this->tiling(block.count_x);
    const auto first = [&](int tile) { return Place{tile, tiling.rows(tile), factor.depth}; };
    Local<Thread> threads(block);
    Local<Acc> acc(block);
    const auto clear = [](Acc& sums) {
      NASFAST_UNROLL
      for (int i = 0; i < 16 * Tile::kTiles; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0;
    };
    Place current = first(block.x);
    begin(block, tiling, current, threads);
    load_in(block, tiling, current, threads);
    prepare_results();  // behind the first loads, because it waits for its own
    block.each([&](int thread) {
      source.template prepare<Tile::kThreads>(thread, factor.depth, planes());
      clear(acc[thread]);
    });
    block.sync();

    int buffer = 0, slab = 0;
    NASFAST_NO_UNROLL
    while (current.tile < tiling.tiles) {
      store(block, current, buffer, threads);
      // this buffer was read two turns ago, and everyone has passed the barrier of the turn between
      block.sync();
      Place next{current.tile, current.rows, current.deep - kSlab};
      if (current.last()) {
        ahead(current.tile, current.rows);
        next = first(current.tile + block.count_x);
      }
      if (next.tile < tiling.tiles) {
        load_in(block, tiling, next, threads);
        if (Tile::kStream) load_weights(block, tiling, next, threads);
      }
      block.warps([&](const Warp& warp) {
        const uint16_t* const slab_weights = weight_slab(Tile::kStream ? buffer : slab);
        SlabProduct<Format, Tile, kTransposed, Local<Acc>>{warp, in_slab(buffer), slab_weights, memory.pitch, acc}.run(
            current.deep);
        if (!current.last()) return;
        write(warp, current.tile, current.rows, acc);
        warp.each([&](int lane) { clear(acc[32 * warp.index + lane]); });
      });
      slab = current.last() ? 0 : slab + 1;
      buffer ^= 1;
      current = next;
    }
    block.sync();
  }
};

}  // namespace nasfast::gpu::pointwise
