// The result of a product: which of its numbers a lane has, and where it leaves what it sums.
#pragma once

#include "product.h"

namespace nasfast::gpu::pointwise {

// Which numbers of the result a lane has, and how many rows a block.
template <class Tile>
struct Result {
  int columns, first_column;
  int each, more;  // tiles of rows of a block, and how many blocks have one more
  int last;        // rows of the last tile

  NASFAST_DEVICE Result(const Factor& factor, int first_column, int row_blocks)
      : columns(factor.columns), first_column(first_column) {
    const int tiles = static_cast<int>((factor.rows + Tile::kRows - 1) / Tile::kRows);
    each = tiles / row_blocks;
    more = tiles - each * row_blocks;
    last = static_cast<int>(factor.rows - int64_t{tiles - 1} * Tile::kRows);
  }
  NASFAST_DEVICE int row(int warp, int lane, int i, int h) const {
    return warp / Tile::kColumnWarps * 16 * Tile::kTiles + 16 * i + 8 * h + lane / 4;
  }
  // Of the first of a lane's 8 channels, within the block.
  NASFAST_DEVICE int column(int warp, int lane) const { return warp % Tile::kColumnWarps * 32 + lane % 4 * 8; }
  // Of the same channel, in what the warps of a block write of it, [row warp][column].
  NASFAST_DEVICE int part(int warp, int lane) const {
    return warp / Tile::kColumnWarps * Tile::kColumns + column(warp, lane);
  }
  // Calls f(i, h, at) for the first `count` rows of a tile that a lane has; at: their place in a tensor of the result's
  // shape, from this tile and these columns on.
  template <class F>
  NASFAST_DEVICE void each_row(int warp, int lane, int count, const F& f) const {
    const int c = column(warp, lane), first = row(warp, lane, 0, 0);
    if (first_column + c >= columns) count = 0;
    const int64_t at = first * columns + c, step = 8 * columns;
    NASFAST_UNROLL
    for (int i = 0; i < Tile::kTiles; ++i) {
      NASFAST_UNROLL
      for (int h = 0; h < 2; ++h) {
        if (first + 16 * i + 8 * h < count) f(i, h, at + (2 * i + h) * step);
      }
    }
  }
  NASFAST_DEVICE int64_t from(int tile) const { return int64_t{tile} * Tile::kRows * columns + first_column; }
  // Rows of the tiles of one of `blocks` blocks that one of its row warps has, or all of them.
  NASFAST_DEVICE float count(int block, int blocks, int row_warp, bool all) const {
    const int first = all ? 0 : row_warp * 16 * Tile::kTiles, size = all ? Tile::kRows : 16 * Tile::kTiles;
    const int tiles = block < more ? each + 1 : each;
    // the last tile is that of the block before the first one with a tile less
    if (block + 1 != (more > 0 ? more : blocks)) return static_cast<float>(tiles * size);
    const int last_rows = last - first < 0 ? 0 : last - first < size ? last - first : size;
    return static_cast<float>((tiles - 1) * size + last_rows);
  }
};

}  // namespace nasfast::gpu::pointwise
