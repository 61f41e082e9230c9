#include "../pointwise.h"
#include "machine.h"

namespace nasfast::gpu {

template void pointwise_forward_deferred<Bf16>(const Machine&, const Grid&, const ForwardStage&, const ApplyArgs&);
template void pointwise_forward_deferred<Fp16>(const Machine&, const Grid&, const ForwardStage&, const ApplyArgs&);

}  // namespace nasfast::gpu
