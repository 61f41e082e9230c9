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
  extern const DepthwiseConv2dKernels kDepthwiseConv2dKernels; \
  extern const Pool3x3Kernels kPool3x3Kernels;                 \
  extern const SqueezeExciteKernels kSqueezeExciteKernels;     \
  extern const GaussianKernels kGaussianKernels;               \
  }
NASFAST_DECLARE(baseline)
NASFAST_DECLARE(avx2)
NASFAST_DECLARE(avx512)
NASFAST_DECLARE(avx512bf16)
NASFAST_DECLARE(amx)  // only the kernels with matrix products
#undef NASFAST_DECLARE

Kernels kernels() {
// AMX has no vectors of its own, so a level names the vectors and the matrix products.
#define NASFAST_KERNELS(vectors, products)                                                                 \
  {                                                                                                        \
    vectors::kBnActKernels, products::kConvKernels, products::kDepthwiseKernels, vectors::kMixedBnKernels, \
        vectors::kDepthwiseConv2dKernels, vectors::kPool3x3Kernels, vectors::kSqueezeExciteKernels,        \
        vectors::kGaussianKernels                                                                          \
  }
  switch (current_isa()) {
#ifdef NASFAST_HAS_AMX
    case Isa::kAmx:
      return NASFAST_KERNELS(avx512bf16, amx);
#endif
#ifdef NASFAST_HAS_AVX512BF16
    case Isa::kAvx512Bf16:
      return NASFAST_KERNELS(avx512bf16, avx512bf16);
#endif
#ifdef NASFAST_HAS_AVX512
    case Isa::kAvx512:
      return NASFAST_KERNELS(avx512, avx512);
#endif
#ifdef NASFAST_HAS_AVX2
    case Isa::kAvx2:
      return NASFAST_KERNELS(avx2, avx2);
#endif
    default:
      return NASFAST_KERNELS(baseline, baseline);
  }
#undef NASFAST_KERNELS
}

}  // namespace nasfast::cpu
