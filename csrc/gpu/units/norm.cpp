#include "../norm.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid reduce_grid(int64_t, int, const Machine&);
template void reduce<Bf16>(const Machine&, const Grid&, const ReduceArgs&);
template void reduce<Fp16>(const Machine&, const Grid&, const ReduceArgs&);
template void apply<Bf16>(const Machine&, const ApplyArgs&);
template void apply<Fp16>(const Machine&, const ApplyArgs&);

}  // namespace nasfast::gpu
