#include "../expansion_gradient.h"
#include "machine.h"

namespace nasfast::gpu {

template Grid expansion_gradient_grid(const Geometry&, const Machine&);
template void expansion_gradient<Bf16>(const Machine&, const Grid&, const ExpansionGradient&);
template void expansion_gradient<Fp16>(const Machine&, const Grid&, const ExpansionGradient&);

}  // namespace nasfast::gpu
