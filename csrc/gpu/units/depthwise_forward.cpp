#include "../depthwise.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid depthwise_forward_grid(const Geometry&, const Machine&);
template void depthwise_forward<Bf16>(const Machine&, const Grid&, const ForwardStage&);
template void depthwise_forward<Fp16>(const Machine&, const Grid&, const ForwardStage&);

}  // namespace nasfast::gpu
