#include "../depthwise.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid depthwise_backward_grid(const Geometry&, const Machine&);
template void depthwise_backward<Bf16>(const Machine&, const Grid&, const BackwardStage&);
template void depthwise_backward<Fp16>(const Machine&, const Grid&, const BackwardStage&);

}  // namespace nasfast::gpu
