#include "../pointwise.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid pointwise_forward_grid(const Geometry&, const Machine&);
template void pointwise_forward<Bf16>(const Machine&, const Grid&, const ForwardStage&);
template void pointwise_forward<Fp16>(const Machine&, const Grid&, const ForwardStage&);

}  // namespace nasfast::gpu
