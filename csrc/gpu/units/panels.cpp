#include "../depthwise_panels.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid panels_forward_grid(const Geometry&, const Machine&);
template Grid panels_backward_grid(const Geometry&, const Machine&);
template void panels_forward<Bf16>(const Machine&, const Grid&, const ForwardStage&);
template void panels_forward<Fp16>(const Machine&, const Grid&, const ForwardStage&);
template void panels_backward<Bf16>(const Machine&, const Grid&, const BackwardStage&);
template void panels_backward<Fp16>(const Machine&, const Grid&, const BackwardStage&);

}  // namespace nasfast::gpu
