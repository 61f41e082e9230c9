#include "../expand_depthwise_backward.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid expand_depthwise_backward_grid(const Geometry&, int, const Machine&);
template void expand_depthwise_backward<Bf16>(const Machine&, const Grid&, const ExpandBackward&);
template void expand_depthwise_backward<Fp16>(const Machine&, const Grid&, const ExpandBackward&);

}  // namespace nasfast::gpu
