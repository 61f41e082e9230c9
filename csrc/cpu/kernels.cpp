#include "kernels.h"

#include "isa.h"

namespace nasfast::cpu {

// defined by the kernel files, once per instruction set
#define NASFAST_DECLARE(isa)                       \
  namespace isa {                                  \
  extern const BnActKernels kBnActKernels;         \
  extern const ConvKernels kConvKernels;           \
  extern const DepthwiseKernels kDepthwiseKernels; \
  extern const MixedBnKernels kMixedBnKernels;     \
  extern const OrthogonalKernels kOrthogonalKernels; \
  }
NASFAST_DECLARE(baseline)
NASFAST_DECLARE(avx2)
NASFAST_DECLARE(avx512)
NASFAST_DECLARE(avx512bf16)
#undef NASFAST_DECLARE

Kernels kernels() {
  switch (current_isa()) {
#ifdef NASFAST_X86_ISAS
    case Isa::kAvx512Bf16:
      return {avx512bf16::kBnActKernels, avx512bf16::kConvKernels, avx512bf16::kDepthwiseKernels, avx512bf16::kMixedBnKernels,
              avx512bf16::kOrthogonalKernels};
    case Isa::kAvx512:
      return {avx512::kBnActKernels, avx512::kConvKernels, avx512::kDepthwiseKernels, avx512::kMixedBnKernels,
              avx512::kOrthogonalKernels};
    case Isa::kAvx2:
      return {avx2::kBnActKernels, avx2::kConvKernels, avx2::kDepthwiseKernels, avx2::kMixedBnKernels,
              avx2::kOrthogonalKernels};
#endif
    default:
      return {baseline::kBnActKernels, baseline::kConvKernels, baseline::kDepthwiseKernels, baseline::kMixedBnKernels,
              baseline::kOrthogonalKernels};
  }
}

}  // namespace nasfast::cpu
