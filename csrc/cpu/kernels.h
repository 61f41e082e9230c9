// The kernels of the instruction set that is in use.
#pragma once

#include "bn_act.h"
#include "conv_bn_act.h"
#include "depthwise_conv2d.h"
#include "gaussian.h"
#include "mixed_bn.h"
#include "pool_3x3.h"
#include "squeeze_excite.h"

namespace nasfast::cpu {

struct Kernels {
  const BnActKernels& bn;
  const ConvKernels& conv;
  const DepthwiseKernels& depthwise;
  const MixedBnKernels& mixed;
  const DepthwiseConv2dKernels& depthwise_conv2d;
  const Pool3x3Kernels& pool_3x3;
  const SqueezeExciteKernels& squeeze_excite;
  const GaussianKernels& gaussian;
};

Kernels kernels();

}  // namespace nasfast::cpu
