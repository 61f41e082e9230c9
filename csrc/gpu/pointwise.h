// Pointwise stages: which tile a product takes, and its launches.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "pointwise_backward.h"
#include "pointwise_forward.h"

namespace nasfast::gpu {
namespace pointwise {

// Rows x columns of a block. The streamed ones hold much in registers, and one of their blocks is on a multiprocessor:
// they are for small maps, of which a multiprocessor has one or two blocks anyway.
using TileSmall = Tile<1, 4, 2, 64, Depth::kStreamed, 1>;  // 64 x 64
using TileSmallDeep = Tile<1, 4, 2, 128, Depth::kStreamed, 1>;
using TileFlat = Tile<2, 2, 4, 64, Depth::kStreamed, 1>;  // 64 x 128
using TileFlatDeep = Tile<2, 2, 4, 128, Depth::kStreamed, 1>;
using TileSquare = Tile<2, 4, 2, 64, Depth::kStreamed, 1>;  // 128 x 64
using TileLow = Tile<2, 4, 2, 32, Depth::kWhole, 1>;        // 128 x 64
using TileTall = Tile<1, 4, 1, 64, Depth::kKept, 3>;        // 64 x 32
using TileWide = Tile<2, 2, 3, 64, Depth::kWhole, 2>;       // 64 x 96
using TileWidest = Tile<2, 1, 6, 128, Depth::kKept, 2>;     // 32 x 192

// A product as the grids see it.
struct ProductShape {
  int64_t rows;
  int depth, columns;
  bool backward;
};

struct ProductPlan {
  int tile = -1;
  double time = 0;
  Grid grid{0, 0, 0};
};

// The estimated time of a launch with one kind of tile, in cycles. The numbers of instructions are counted from compiled
// kernels. A multiprocessor issues 4 of them in a cycle, of which it reaches 70 %, and a warp one in 3 cycles.
template <class Tile, class Machine>
void consider(const Machine& machine, const ProductShape& shape, int index, ProductPlan& best) {
  using Pieces = Share<Tile::kThreads, Tile::kRows, Tile::kSlab / 8>;
  const size_t shared = shape.backward
                            ? Memory<Tile, true>(shape.depth, BackwardSource::kPlanes, 3).bytes
                            : Memory<Tile, false>(shape.depth, ForwardSource::kPlanes, Tile::kRowWarps).bytes;
  if (shared > machine.shared_memory || (Tile::kWhole && shape.depth > Tile::kSlab)) return;
  const int resident = std::max(1, std::min<int>(Tile::kBlocks, machine.shared_memory / shared));
  const int groups = divide_up(shape.columns, Tile::kColumns);
  const int64_t tiles = (shape.rows + Tile::kRows - 1) / Tile::kRows;
  const int64_t most = std::clamp(machine.multiprocessors * resident / groups, 1, kMostRows);
  const int64_t each = (tiles + most - 1) / most, rows = (tiles + each - 1) / each;
  const double slabs = divide_up(shape.depth, Tile::kSlab), warps = Tile::kThreads / 32.0;
  const double weights = 12.0 * Tile::kColumns * Tile::kSlab / 8 / Tile::kThreads + 30;
  const double tile = slabs * (90 + Pieces::kMost * (shape.backward ? 56 : 32) + (Tile::kStream ? weights : 0)) +
                      shape.depth / 16.0 * (5 * Tile::kTiles + 2) + 16 * Tile::kTiles * (shape.backward ? 9 : 6) + 80;
  const double fixed = (Tile::kStream ? 0 : slabs * weights) + 500;
  const double here = std::ceil(static_cast<double>(rows * groups) / machine.multiprocessors);
  const double rate = std::min(0.7, std::min<double>(here, resident) * warps / 4 / 3);
  const double time = here * warps / 4 * (each * tile + fixed) / rate;
  if (best.tile < 0 || time < best.time) {
    best = {index, time, {static_cast<int>(rows), groups, shared}};
  }
}

// The tiles of a kernel.
template <class... Tiles>
struct TileList {
  // Raises if the shared memory of this machine has no room for any tile.
  template <class Machine>
  static ProductPlan plan(const Machine& machine, const ProductShape& shape) {
    ProductPlan best;
    int index = 0;
    (consider<Tiles>(machine, shape, index++, best), ...);
    if (best.tile < 0) {
      throw std::runtime_error("conv_bn_act_chain: the " + std::to_string(machine.shared_memory) +
                               " bytes of shared memory of a block have no room for a product of " +
                               std::to_string(shape.depth) + " to " + std::to_string(shape.columns) +
                               " channels: use backend reference");
    }
    return best;
  }
  // Launches a kernel with the tile that the plan has.
  template <template <class, class> class Kernel, class Format, class Machine, class Args>
  static void launch(const Machine& machine, const ProductShape& shape, const Grid& grid, const Args& args) {
    const int tile = plan(machine, shape).tile;
    int index = 0;
    const auto with = [&](auto kernel) {
      if (index++ == tile) {
        machine.template launch<decltype(kernel)>(grid.rows, grid.groups, grid.shared, args);
      }
    };
    (with(Kernel<Format, Tiles>{}), ...);
  }
};

// Each of these is the best for many shapes: without it, `consider` has larger times by 1 % or more on average. TileSmall
// of backward also needs the least shared memory, which the most channels of a plan have (nasfast/ops/chain/limits.py).
using ForwardTiles = TileList<TileSmallDeep, TileFlat, TileSquare, TileTall, TileWide, TileWidest>;
using BackwardTiles =
    TileList<TileSmall, TileSmallDeep, TileFlat, TileFlatDeep, TileLow, TileTall, TileWide, TileWidest>;

static_assert(DeferredSource::kPlanes == ForwardSource::kPlanes,
              "a stage has one grid, whether it writes its input or not");
template <class Format, class Tile>
using ReadingForward = PointwiseForward<Format, Tile, ForwardSource>;
template <class Format, class Tile>
using DeferredForward = PointwiseForward<Format, Tile, DeferredSource>;

inline ProductShape forward_shape(const Geometry& g) { return {g.out_rows(), g.in_channels, g.out_channels, false}; }
inline ProductShape backward_shape(const Geometry& g) { return {g.out_rows(), g.out_channels, g.in_channels, true}; }

}  // namespace pointwise

template <class Machine>
Grid pointwise_forward_grid(const Geometry& g, const Machine& machine) {
  return pointwise::ForwardTiles::plan(machine, pointwise::forward_shape(g)).grid;
}

template <class Machine>
Grid pointwise_backward_grid(const Geometry& g, const Machine& machine) {
  return pointwise::BackwardTiles::plan(machine, pointwise::backward_shape(g)).grid;
}

template <class Format, class Machine>
void pointwise_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage) {
  using namespace pointwise;
  const ProductShape shape = forward_shape(stage.geometry);
  const Factor factor{shape.rows, shape.depth, shape.columns, stage.weight};
  const ForwardArgs<ForwardSource> args{factor, {{stage.x}, stage.fold, stage.act}, stage.y, stage.norm};
  ForwardTiles::launch<ReadingForward, Format>(machine, shape, grid, args);
}

template <class Format, class Machine>
void pointwise_forward_deferred(const Machine& machine, const Grid& grid, const ForwardStage& stage,
                                const ApplyArgs& input) {
  using namespace pointwise;
  const ProductShape shape = forward_shape(stage.geometry);
  const Factor factor{shape.rows, shape.depth, shape.columns, stage.weight};
  const DeferredSource source{{input.y, input.added}, input.fold, input.out};
  const ForwardArgs<DeferredSource> args{factor, source, stage.y, stage.norm};
  ForwardTiles::launch<DeferredForward, Format>(machine, shape, grid, args);
}

template <class Format, class Machine>
void pointwise_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage) {
  const pointwise::ProductShape shape = pointwise::backward_shape(stage.geometry);
  const pointwise::Factor factor{shape.rows, shape.depth, shape.columns, stage.weight};
  const pointwise::BackwardArgs args{factor,         {{stage.grad, stage.y}, stage.mask, stage.back},
                                     stage.dx,       stage.previous_y,
                                     stage.interval, stage.gradient,
                                     stage.added,    stage.precomputed};
  pointwise::BackwardTiles::launch<pointwise::PointwiseBackward, Format>(machine, shape, grid, args);
}

}  // namespace nasfast::gpu
