// Forward of a depthwise stage on tensor cores: reads the output of the stage before through its BatchNorm and activation.
#pragma once

#include "depthwise_matrices.h"

namespace nasfast::gpu {

// kAhead: loads of a thread that are under way at once.
template <class Format, int kAhead_>
struct MatrixForwardSource {
  static constexpr int kAhead = kAhead_;
  const ForwardStage& stage;
  const float* planes;  // scale, shift and pivot of the channels of the block

  struct Constants {
    float scale[8], shift[8];
    uint32_t most;  // the bound of relu6, or none
  };
  struct Beside {
    float pivot[8];
  };
  using Raw = Vec4;

  NASFAST_DEVICE void prepare(int lane, Constants& to) const {
    to.most = stage.act == Act::kRelu6 ? Format::kSixes : Format::pack(INFINITY, INFINITY);
    NASFAST_UNROLL
    for (int j = 0; j < 8; ++j) {
      to.scale[j] = planes[8 * (lane % 4) + j];
      to.shift[j] = planes[kSlots + 8 * (lane % 4) + j];
    }
  }
  NASFAST_DEVICE void load(int64_t at, Raw& to) const { to = *reinterpret_cast<const Vec4*>(stage.x + at); }
  // Whether no activation comes before.
  NASFAST_DEVICE bool simple() const { return stage.fold == nullptr || stage.act == Act::kIdentity; }
  template <bool kSimple>
  NASFAST_DEVICE Vec4 convert(const Constants& fold, const Raw& raw) const {
    Vec4 made;
    NASFAST_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float a = fma(Format::first(raw.v[j]), fold.scale[2 * j], fold.shift[2 * j]);
      const float b = fma(Format::second(raw.v[j]), fold.scale[2 * j + 1], fold.shift[2 * j + 1]);
      made.v[j] = kSimple ? Format::pack(a, b) : Format::at_most(Format::pack_relu(a, b), fold.most);
    }
    return made;
  }

  NASFAST_DEVICE void prepare_beside(int lane, Beside& to) const {
    NASFAST_UNROLL
    for (int j = 0; j < 8; ++j) to.pivot[j] = planes[2 * kSlots + 8 * (lane % 4) + j];
  }
  NASFAST_DEVICE void load_beside(int64_t, Vec4&) const {}
  static NASFAST_DEVICE bool sums() { return true; }
  template <bool kSums>
  NASFAST_DEVICE void take(int64_t at, const uint32_t (&result)[4], const Vec4&, const Beside& beside,
                           ChannelSums& sums) const {
    store_vector(stage.y + at, Vec4{result[0], result[1], result[2], result[3]});
    NASFAST_UNROLL
    for (int j = 0; j < 8; ++j) {
      const uint32_t pair = result[j / 2];
      const float distance = (j % 2 == 0 ? Format::first(pair) : Format::second(pair)) - beside.pivot[j];
      sums.first[j] += distance;
      sums.second[j] = fma(distance, distance, sums.second[j]);
    }
  }
};

template <class Format, int kKernel, int kTiles>
struct DepthwiseForwardMatrices {
  using Shape = Panel<kKernel, kTiles>;
  using Source = MatrixForwardSource<Format, kTiles == 2 ? 4 : kTiles == 4 ? 3 : 2>;
  static constexpr int kThreads = kMatrixThreads, kBlocks = kMatrixBlocks;
  static constexpr size_t kShared = Shape::kBytes + 3 * kSlots * sizeof(float);
  struct Args {
    ForwardStage stage;
    Units units;
  };

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    if constexpr (!kMatricesRun) return trap();
    const ForwardStage& stage = args.stage;
    float* const planes = reinterpret_cast<float*>(shared + Shape::kBytes);
    const Panels<Format, Shape, Source> panels(args.units, block.x, shared);
    const int first = panels.first, channel_count = panels.channel_count;
    panels.begin(block, stage.weight, false);
    Local<ChannelSums> sums(block);
    block.each([&](int thread) {
      sums[thread] = {};
      if (thread >= channel_count) return;
      const Fold fold = stage.fold == nullptr ? Fold{1, 0} : stage.fold[first + thread];
      planes[thread] = fold.scale, planes[kSlots + thread] = fold.shift;
    });
    block.sync();
    // the pivot is the first number of the block, as it is stored
    const auto prepare_results = [&] {
      block.each([&](int thread) {
        if (thread < kSlots) {
          const uint16_t* const at = panels.pixels + slot_of_channel(thread) * Shape::kChannel + Shape::line(0);
          planes[2 * kSlots + thread] = Format::first(*at);
        }
      });
      block.sync();
    };
    panels.run(block, Source{stage, planes}, prepare_results, sums);

    Vec2* const parts = reinterpret_cast<Vec2*>(shared);
    gather_by_warp(block, sums, parts);
    const Norm& norm = stage.norm;
    const float count = args.units.numbers(block.y);
    block.each([&](int thread) {
      if (thread >= channel_count) return;
      const GradientSums total = over_warps(parts, thread);
      const Moments m = Sums{total.sum, total.product}.moments(planes[2 * kSlots + thread], count);
      norm.reduction.partial[int64_t{block.y} * args.units.channels + first + thread] = {as_bits(m.mean),
                                                                                         as_bits(m.m2)};
    });
    finish_norm<kThreads>(block, norm, block.y, block.x, first, channel_count,
                          [&](int row) { return args.units.numbers(row); });
  }
};

}  // namespace nasfast::gpu
