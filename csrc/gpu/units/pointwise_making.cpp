#include "../pointwise.h"
#include "machine.h"

namespace nasfast::gpu {

template void pointwise_making<Bf16>(const Machine&, const Grid&, const ForwardStage&, const ApplyArgs&);
template void pointwise_making<Fp16>(const Machine&, const Grid&, const ForwardStage&, const ApplyArgs&);

}  // namespace nasfast::gpu
