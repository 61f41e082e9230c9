// The kernels of the instruction set in use.
#pragma once

#include "bn_act.h"
#include "conv_bn_act.h"
#include "mixed_bn.h"
#include "orthogonal.h"

namespace nasfast::cpu {

struct Kernels {
  const BnActKernels& bn;
  const ConvKernels& conv;
  const DepthwiseKernels& depthwise;
  const MixedBnKernels& mixed;
  const OrthogonalKernels& orthogonal;
};

Kernels kernels();

}  // namespace nasfast::cpu
