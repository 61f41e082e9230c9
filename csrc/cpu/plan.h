// The plan of a chain: what its stages are, their geometry, and where their numbers lie. nasfast/ops/chain/plan.py makes it
// and passes it to the operators as integers. The launchers read and check it, and decide nothing in it again.
#pragma once

#include <cstdint>
#include <vector>

#include "params.h"

namespace nasfast::cpu {

constexpr const char* kConvOp = "conv_bn_act_chain";

// The numbers are those of `Kind` in nasfast/ops/chain/plan.py.
enum class Kind { kPointwise, kDepthwise, kDense };

constexpr int64_t kNowhere = -1;

struct StagePlan {
  Kind kind;
  Act act;
  int64_t in_channels, out_channels, kernel, stride;
  int64_t height, width, out_height, out_width;
  int64_t rows;  // pixels of the output
  // Element of the saved tensor where the output starts; kNowhere if backward computes it again.
  int64_t saved_at;
  int64_t statistics_at;  // element of the statistics where the mean starts

  int64_t padding() const { return kernel / 2; }
};

struct ChainPlan {
  int64_t batch, channels, height, width;  // of the input of the first stage
  bool shuffle;
  int64_t saved_size, statistics_size;  // elements
  std::vector<StagePlan> stages;

  // Refuses a plan that does not fit together, or has a stage that the kernels cannot run.
  explicit ChainPlan(const std::vector<int64_t>& numbers);

  // Whether backward computes the output of the first stage again, for which it needs x.
  bool recompute() const { return stages[0].saved_at < 0; }
};

}  // namespace nasfast::cpu
