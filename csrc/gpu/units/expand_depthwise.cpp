#include "../expand_depthwise.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid expand_depthwise_forward_grid(const Geometry&, int, const Machine&);
template void expand_depthwise_forward<Bf16>(const Machine&, const Grid&, const ExpandForward&);
template void expand_depthwise_forward<Fp16>(const Machine&, const Grid&, const ExpandForward&);

}  // namespace nasfast::gpu
