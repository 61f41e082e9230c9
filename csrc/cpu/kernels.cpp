#include "kernels.h"

#include "isa.h"

namespace nasfast::cpu {

// The kernel files define these once per instruction set.
#define NASFAST_DECLARE(isa)                                   \
  namespace isa {                                              \
  extern const BnActKernels kBnActKernels;                     \
  extern const ConvKernels kConvKernels;                       \
  extern const DepthwiseKernels kDepthwiseKernels;             \
  extern const MixedBnKernels kMixedBnKernels;                 \
  extern const OrthogonalKernels kOrthogonalKernels;           \
  extern const DepthwiseConv2dKernels kDepthwiseConv2dKernels; \
  extern const Pool3x3Kernels kPool3x3Kernels;                 \
  extern const SqueezeExciteKernels kSqueezeExciteKernels;     \
  }
NASFAST_DECLARE(baseline)
NASFAST_DECLARE(avx2)
NASFAST_DECLARE(avx512)
NASFAST_DECLARE(avx512bf16)
NASFAST_DECLARE(amx)  // only the kernels with matrix products
#undef NASFAST_DECLARE

Kernels kernels() {
  switch (current_isa()) {
#ifdef NASFAST_X86_ISAS
    case Isa::kAmx:
      return {avx512bf16::kBnActKernels,      amx::kConvKernels,
              amx::kDepthwiseKernels,         avx512bf16::kMixedBnKernels,
              avx512bf16::kOrthogonalKernels, avx512bf16::kDepthwiseConv2dKernels,
              avx512bf16::kPool3x3Kernels,    avx512bf16::kSqueezeExciteKernels};
    case Isa::kAvx512Bf16:
      return {avx512bf16::kBnActKernels,   avx512bf16::kConvKernels,         avx512bf16::kDepthwiseKernels,
              avx512bf16::kMixedBnKernels, avx512bf16::kOrthogonalKernels,   avx512bf16::kDepthwiseConv2dKernels,
              avx512bf16::kPool3x3Kernels, avx512bf16::kSqueezeExciteKernels};
    case Isa::kAvx512:
      return {avx512::kBnActKernels,   avx512::kConvKernels,         avx512::kDepthwiseKernels,
              avx512::kMixedBnKernels, avx512::kOrthogonalKernels,   avx512::kDepthwiseConv2dKernels,
              avx512::kPool3x3Kernels, avx512::kSqueezeExciteKernels};
    case Isa::kAvx2:
      return {avx2::kBnActKernels,   avx2::kConvKernels,         avx2::kDepthwiseKernels,
              avx2::kMixedBnKernels, avx2::kOrthogonalKernels,   avx2::kDepthwiseConv2dKernels,
              avx2::kPool3x3Kernels, avx2::kSqueezeExciteKernels};
#endif
    default:
      return {baseline::kBnActKernels,   baseline::kConvKernels,         baseline::kDepthwiseKernels,
              baseline::kMixedBnKernels, baseline::kOrthogonalKernels,   baseline::kDepthwiseConv2dKernels,
              baseline::kPool3x3Kernels, baseline::kSqueezeExciteKernels};
  }
}

}  // namespace nasfast::cpu
