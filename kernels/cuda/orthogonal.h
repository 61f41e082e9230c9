// Launches of orthogonalize on the GPU. Needs no torch.
#pragma once

#include "../../csrc/orthogonal/householder.h"

struct CUstream_st;

namespace nasfast::cuda {

// Does one step of `count` matrices, each by up to `most` blocks. The tasks are on the device that is the current one.
// Raises if the launch fails. T: float or double.
template <typename T>
void launch_step(const orthogonal::Task<T>* tasks, int count, orthogonal::Step step, int i_panel, int most,
                 CUstream_st* stream);

}  // namespace nasfast::cuda
