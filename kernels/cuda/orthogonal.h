// Launches of orthogonalize on the GPU. Every function raises if a launch fails. Needs no torch.
#pragma once

#include "../../csrc/orthogonal/blocks.h"

struct CUstream_st;

namespace nasfast::cuda {

using Stream = CUstream_st*;

// The tasks are on the device that is the current one. T: float or double.
template <typename T>
void launch_tiny(const orthogonal::TinyTask<T>* tasks, int count, Stream stream);
// Does every matrix, of at most `rows` rows, by one block.
template <typename T>
void launch_whole(const orthogonal::Task<T>* tasks, int count, int rows, Stream stream);
// Does one step of all matrices, each by up to `most` blocks.
template <typename T>
void launch_step(const orthogonal::Task<T>* tasks, int count, int rows, orthogonal::PanelStep step, int most,
                 Stream stream);

}  // namespace nasfast::cuda
