#include "../pointwise.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid pointwise_backward_grid(const Geometry&, const Machine&);
template void pointwise_backward<Bf16>(const Machine&, const Grid&, const BackwardStage&);
template void pointwise_backward<Fp16>(const Machine&, const Grid&, const BackwardStage&);

}  // namespace nasfast::gpu
