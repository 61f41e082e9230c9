// Pointwise stages: which tile a product takes, and its launches.
#pragma once

#include <algorithm>
#include <cmath>

#include "pointwise_backward.h"
#include "pointwise_forward.h"

namespace nasfast::gpu {
namespace pointwise {

using TileTall = Tile<1, 8, 1, 64, Depth::kKept>;
using TileSquare = Tile<1, 4, 2, 64, Depth::kKept>;
using TileStream = Tile<1, 4, 2, 64, Depth::kStreamed>;
using TileWide = Tile<2, 2, 3, 64, Depth::kWhole>;
using TileWidest = Tile<2, 1, 6, 128, Depth::kWhole>;

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
// kernels. A multiprocessor issues 4 of them in a cycle, and a warp one in 3 cycles.
template <class Tile, class Machine>
void consider(const Machine& machine, const ProductShape& shape, int index, ProductPlan& best) {
  const size_t shared = shape.backward ? Memory<Tile, true>(shape.depth, BackwardSource::kPlanes, 3).bytes
                                       : Memory<Tile, false>(shape.depth, ForwardSource::kPlanes, 0).bytes;
  if (shared > machine.shared_memory || (Tile::kDepth == Depth::kWhole && shape.depth > Tile::kSlab)) return;
  const int resident = std::max(1, std::min<int>(512 / Tile::kThreads, machine.shared_memory / shared));
  const int groups = (shape.columns + Tile::kColumns - 1) / Tile::kColumns;
  const int64_t tiles = (shape.rows + Tile::kRows - 1) / Tile::kRows;
  const int64_t most = std::clamp(machine.multiprocessors * resident / groups, 1, kMostRows);
  const int64_t each = (tiles + most - 1) / most, rows = (tiles + each - 1) / each;
  const double slabs = divide_up(shape.depth, Tile::kSlab);
  const int pieces = (std::min(shape.depth, Tile::kSlab) / 8 * Tile::kRows + Tile::kThreads - 1) / Tile::kThreads;
  const double weights = 30.0 * Tile::kWeightPieces + 10;
  const double tile = slabs * (pieces * (shape.backward ? 45 : 30) + 60 + (Tile::kStream ? weights : 0)) +
                      shape.depth / 16.0 * (5 * Tile::kTiles + 4) + 16 * Tile::kTiles * (shape.backward ? 9 : 6) + 60;
  const double fixed = (Tile::kStream ? 0 : slabs * weights) + 400;
  const int64_t blocks = rows * groups;
  const double here = std::ceil(static_cast<double>(blocks) / machine.multiprocessors);
  const double turns = std::ceil(here / resident);
  const double time = std::max(here * Tile::kThreads / 32 / 4, 3 * turns) * (each * tile + fixed);
  if (best.tile < 0 || time < best.time) {
    best = {index, time, {static_cast<int>(rows), groups, shared}};
  }
}

template <class Machine>
ProductPlan plan_product(const Machine& machine, const ProductShape& shape) {
  ProductPlan best;
  consider<TileStream>(machine, shape, 0, best);
  consider<TileTall>(machine, shape, 1, best);
  consider<TileSquare>(machine, shape, 2, best);
  consider<TileWide>(machine, shape, 3, best);
  consider<TileWidest>(machine, shape, 4, best);
  return best;
}

// Launches a kernel with the tile that the plan has.
template <template <class, class> class Kernel, class Format, class Machine, class Args>
void launch_product(const Machine& machine, const ProductShape& shape, const Grid& grid, const Args& args) {
  const auto launch = [&](auto kernel) {
    machine.template launch<decltype(kernel)>(grid.rows, grid.groups, grid.shared, args);
  };
  switch (plan_product(machine, shape).tile) {
    case 0:
      return launch(Kernel<Format, TileStream>{});
    case 1:
      return launch(Kernel<Format, TileTall>{});
    case 2:
      return launch(Kernel<Format, TileSquare>{});
    case 3:
      return launch(Kernel<Format, TileWide>{});
    default:
      return launch(Kernel<Format, TileWidest>{});
  }
}

inline ProductShape forward_shape(const Geometry& g) { return {g.out_rows(), g.in_channels, g.out_channels, false}; }
inline ProductShape backward_shape(const Geometry& g) { return {g.out_rows(), g.out_channels, g.in_channels, true}; }

}  // namespace pointwise

template <class Machine>
Grid pointwise_forward_grid(const Geometry& g, const Machine& machine) {
  return pointwise::plan_product(machine, pointwise::forward_shape(g)).grid;
}

template <class Machine>
Grid pointwise_backward_grid(const Geometry& g, const Machine& machine) {
  return pointwise::plan_product(machine, pointwise::backward_shape(g)).grid;
}

template <class Format, class Machine>
void pointwise_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage) {
  const pointwise::ProductShape shape = pointwise::forward_shape(stage.geometry);
  const pointwise::Factor factor{shape.rows, shape.depth, shape.columns, stage.weight};
  const pointwise::ForwardArgs args{factor, {{stage.x}, stage.fold, stage.act}, stage.y, stage.norm};
  pointwise::launch_product<pointwise::PointwiseForward, Format>(machine, shape, grid, args);
}

template <class Format, class Machine>
void pointwise_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage) {
  const pointwise::ProductShape shape = pointwise::backward_shape(stage.geometry);
  const pointwise::Factor factor{shape.rows, shape.depth, shape.columns, stage.weight};
  const pointwise::BackwardArgs args{factor,         {{stage.grad, stage.y}, stage.mask, stage.back},
                                     stage.dx,       stage.before,
                                     stage.interval, stage.gradient,
                                     stage.added};
  pointwise::launch_product<pointwise::PointwiseBackward, Format>(machine, shape, grid, args);
}

}  // namespace nasfast::gpu
