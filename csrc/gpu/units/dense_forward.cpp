#include "../dense_forward.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid dense_forward_grid(const Geometry&, const Machine&);
template void dense_forward<Bf16>(const Machine&, const Grid&, const ForwardStage&);
template void dense_forward<Fp16>(const Machine&, const Grid&, const ForwardStage&);

}  // namespace nasfast::gpu
