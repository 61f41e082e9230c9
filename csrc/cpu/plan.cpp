#include "plan.h"

#include <initializer_list>

#include "launch.h"

namespace nasfast::cpu {
namespace {

// the numbers of a plan, as ChainPlan.numbers in nasfast/ops/chain/plan.py has them
constexpr size_t kHeader = 6, kPerStage = 9;
constexpr int64_t kKinds = 3, kActs = 6;
// No memory has so many elements, and products of numbers below it may overflow.
constexpr int64_t kMaxElements = int64_t{1} << 48;

// Whether all factors are positive and there can be a tensor of their product.
bool fits(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor <= 0 || factor > kMaxElements / product) return false;
    product *= factor;
  }
  return true;
}

void check_kind(const StagePlan& s, size_t i) {
  const bool depthwise = s.kind == Kind::kDepthwise && s.in_channels == s.out_channels &&
                         (s.kernel == 3 || s.kernel == 5 || s.kernel == 7) && (s.stride == 1 || s.stride == 2);
  const bool pointwise = s.kind == Kind::kPointwise && s.kernel == 1 && s.stride == 1;
  const bool dense = s.kind == Kind::kDense && i == 0;
  STD_TORCH_CHECK(
      depthwise || pointwise || dense, kConvOp, ", stage ", i,
      " of the plan: must be pointwise with stride 1, depthwise with kernel 3, 5 or 7, stride 1 or 2 and as "
      "many output as input channels, or, as the first stage, dense; got kind ",
      static_cast<int64_t>(s.kind), ", kernel ", s.kernel, ", stride ", s.stride, ", ", s.in_channels, " -> ",
      s.out_channels, " channels");
}

void check_geometry(const StagePlan& s, size_t i) {
  STD_TORCH_CHECK(fits({s.in_channels, s.out_channels, s.kernel, s.kernel}) && s.kernel % 2 == 1 && s.stride > 0,
                  kConvOp, ", stage ", i, " of the plan: needs channels, an odd kernel and a stride, got ",
                  s.out_channels, ", ", s.kernel, " and ", s.stride);
  STD_TORCH_CHECK(s.out_height == (s.height - 1) / s.stride + 1 && s.out_width == (s.width - 1) / s.stride + 1, kConvOp,
                  ", stage ", i, " of the plan: an input of ", s.height, " x ", s.width, " pixels and stride ",
                  s.stride, " do not give ", s.out_height, " x ", s.out_width, " pixels");
}

}  // namespace

ChainPlan::ChainPlan(const std::vector<int64_t>& numbers) {
  STD_TORCH_CHECK(numbers.size() >= kHeader + kPerStage && (numbers.size() - kHeader) % kPerStage == 0, kConvOp,
                  ": a plan has ", kHeader, " numbers and ", kPerStage, " for each stage, got ", numbers.size());
  batch = numbers[0];
  channels = numbers[1];
  height = numbers[2];
  width = numbers[3];
  shuffle = numbers[4] != 0;
  saved_size = numbers[5];
  STD_TORCH_CHECK(fits({batch, channels, height, width}), kConvOp, ": the plan is for an empty x, of shape (", batch,
                  ", ", channels, ", ", height, ", ", width, ")");
  int64_t c = channels, h = height, w = width, saved = 0;
  statistics_size = 0;
  for (size_t at = kHeader, i = 0; at < numbers.size(); at += kPerStage, ++i) {
    const int64_t* n = numbers.data() + at;
    STD_TORCH_CHECK(n[0] >= 0 && n[0] < kKinds && n[1] >= 0 && n[1] < kActs, kConvOp, ", stage ", i,
                    " of the plan: no such kind or activation: ", n[0], ", ", n[1]);
    StagePlan stage{
        static_cast<Kind>(n[0]), static_cast<Act>(n[1]), c, n[2], n[3], n[4], h, w, n[5], n[6], 0, n[7], n[8]};
    check_geometry(stage, i);
    check_kind(stage, i);
    STD_TORCH_CHECK(fits({batch, stage.out_height, stage.out_width, stage.out_channels}), kConvOp, ", stage ", i,
                    " of the plan: its output is too large");
    stage.rows = batch * stage.out_height * stage.out_width;
    const bool first_of_two =
        i == 0 && stage.kind == Kind::kPointwise && numbers.size() > kHeader + kPerStage && !shuffle;
    const bool recomputed = stage.saved_at == kNowhere;
    STD_TORCH_CHECK(stage.saved_at >= saved || (recomputed && first_of_two), kConvOp, ", stage ", i,
                    " of the plan: must be saved behind the stages before it; only a pointwise first stage before a "
                    "depthwise one, without shuffle, can be computed again");
    STD_TORCH_CHECK(recomputed || stage.saved_at % kAlignment == 0, kConvOp, ", stage ", i,
                    " of the plan: must be saved at a multiple of ", kAlignment, " elements");
    STD_TORCH_CHECK(stage.statistics_at == statistics_size, kConvOp, ", stage ", i,
                    " of the plan: its statistics must follow those of the stage before it");
    STD_TORCH_CHECK(stage.saved_at <= kMaxElements && saved_size <= kMaxElements, kConvOp, ", stage ", i,
                    " of the plan: is saved beyond the end of any memory");
    if (stage.saved_at >= 0) saved = stage.saved_at + stage.rows * stage.out_channels;
    STD_TORCH_CHECK(saved <= saved_size, kConvOp, ", stage ", i, " of the plan: does not fit into ", saved_size,
                    " saved elements");
    statistics_size += 2 * stage.out_channels;
    c = stage.out_channels;
    h = stage.out_height;
    w = stage.out_width;
    stages.push_back(stage);
  }
  STD_TORCH_CHECK(!recompute() || stages[1].kind == Kind::kDepthwise, kConvOp,
                  ": only a pointwise stage before a depthwise one can be computed again");
  STD_TORCH_CHECK(!shuffle || (h == height && w == width && c == channels), kConvOp,
                  ": shuffle needs stages that keep the shape of their input");
}

}  // namespace nasfast::cpu
