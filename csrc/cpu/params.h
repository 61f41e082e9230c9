// Types that the launchers and kernels of all operators use.
#pragma once

#include <cstdint>

namespace nasfast::cpu {

enum class Act { kIdentity, kRelu, kRelu6, kTanh, kHswish, kSilu };

// The coefficients of one BatchNorm: arrays with one float per channel, padded to whole vectors. Forward: z = (y -
// center) * scale + shift. center is the mean rounded to float, and the rest of the mean is in shift, so that values
// far from zero keep their digits. Backward: dy = dz * scale + (y - center) * slope + offset.
struct BnFold {
  const float* center;
  const float* scale;
  const float* shift;
  const float* slope;
  const float* offset;
  Act act;

  // The coefficients of the channels from c on.
  BnFold from(int64_t c) const { return {center + c, scale + c, shift + c, slope + c, offset + c, act}; }
};

}  // namespace nasfast::cpu
