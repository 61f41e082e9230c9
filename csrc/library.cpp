// The schemas of all operators of nasfast. Each kernel is registered in its own file; nasfast/ops has the fake kernels
// and autograd.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(nasfast, m) {
  // Formula: nasfast/ops/reference.py, bn_act. x is dense NCHW or NHWC; y, residual, grad and dx have its layout and
  // type. Without running statistics, forward uses the statistics of the batch and returns them (float64, biased var).
  // With running statistics it returns an empty mean and var.
  m.def(
      "bn_act_fwd(Tensor x, Tensor weight, Tensor bias, Tensor? residual, Tensor? running_mean, Tensor? running_var, "
      "float eps, str act) -> (Tensor y, Tensor mean, Tensor var)");
  // The same with running statistics, written over x.
  m.def(
      "bn_act_running_(Tensor(a!) x, Tensor weight, Tensor bias, Tensor? residual, Tensor running_mean, "
      "Tensor running_var, float eps, str act) -> ()");
  // mean and var are those that forward used; batch_statistics says whether they depend on x. Results that are not
  // wanted are empty.
  m.def(
      "bn_act_bwd(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor var, float eps, str act, "
      "bool batch_statistics, bool want_x, bool want_weight, bool want_bias) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)");

  // Formula: nasfast/ops/reference.py, mixed_bn. xs, y, grad and dxs are NHWC tensors of one shape and type. statistics
  // has the mean and the biased var of the tensors that are normalised: [tensor][2][channel], float64.
  m.def("mixed_bn_fwd(Tensor[] xs, Tensor gates, bool[] normalize, float eps) -> (Tensor y, Tensor statistics)");
  // wants has one flag for each of dxs and one for dgates. Results that are not wanted are empty.
  m.def(
      "mixed_bn_bwd(Tensor grad, Tensor[] xs, Tensor gates, Tensor statistics, bool[] normalize, float eps, "
      "bool[] wants) -> (Tensor[] dxs, Tensor dgates)");

  // Formula: nasfast/ops/reference.py, conv_bn_act_chain. A chain of stages; each stage is a convolution without bias,
  // BatchNorm and an activation. x, y, residual, grad and dx are NHWC. A stage whose running statistics are empty uses
  // those of the batch.
  //   plan: what the stages are, from nasfast/ops/chain/plan.py (ChainPlan.numbers).
  //   add_input: x is added to the result.
  //   keep: whether to return `saved`, which is empty otherwise.
  // saved is what backward needs beside x; the plan says where its parts are. statistics has mean and biased var of all
  // stages, [stage][2][channel], float64; the CUDA kernels append numbers of their own.
  m.def(
      "conv_bn_act_chain_fwd(Tensor x, Tensor[] conv_weights, Tensor[] bn_weights, Tensor[] bn_biases, "
      "Tensor[] running_means, Tensor[] running_vars, Tensor? residual, int[] plan, float[] eps, bool add_input, "
      "bool keep) -> (Tensor y, Tensor saved, Tensor statistics)");
  // x is passed only where the plan computes the output of the first stage again. wants has one flag for dx and then
  // two for each stage, for bn_weight and bn_bias. Results that are not wanted are empty.
  m.def(
      "conv_bn_act_chain_bwd(Tensor grad, Tensor? x, Tensor saved, Tensor statistics, Tensor[] conv_weights, "
      "Tensor[] bn_weights, Tensor[] bn_biases, bool[] batch_statistics, int[] plan, float[] eps, bool add_input, "
      "bool[] wants) -> (Tensor dx, Tensor[] dweights, Tensor[] dbiases)");

  // Formula: nasfast/ops/reference.py, depthwise_conv2d. x, y, grad and dx are NHWC; weight and dweight are (C, 1, k,
  // k), contiguous, float32.
  m.def("depthwise_conv2d_fwd(Tensor x, Tensor weight, int stride, int dilation) -> Tensor y");
  // x is passed only with want_weight, so its shape is an argument. Results that are not wanted are empty.
  m.def(
      "depthwise_conv2d_bwd(Tensor grad, Tensor? x, int[] shape, Tensor weight, int stride, int dilation, bool want_x, "
      "bool want_weight) -> (Tensor dx, Tensor dweight)");

  // Formula: nasfast/ops/reference.py, pool_3x3. x, y, index, grad and dx are NHWC. kind is max or avg. index is the
  // place of each maximum in its window, 3 * row + column, uint8; it is empty for avg and without keep.
  m.def("pool_3x3_fwd(Tensor x, str kind, int stride, bool keep) -> (Tensor y, Tensor index)");
  // shape is that of x.
  m.def("pool_3x3_bwd(Tensor grad, Tensor index, int[] shape, str kind, int stride) -> Tensor dx");

  // The two passes of squeeze_excite (nasfast/ops/squeeze.py) over NHWC tensors of one type. sums is (N, C), float32: the
  // sum over the pixels of x, or of x * y.
  m.def("squeeze_excite_sums(Tensor x, Tensor? y) -> Tensor sums");
  // out = x * scale + shift; scale and shift are (N, C), float32.
  m.def("squeeze_excite_scale(Tensor x, Tensor scale, Tensor? shift) -> Tensor out");

  // An uninitialised NHWC tensor of this shape (N, C, H, W) in recycled memory, of the type of `like`.
  m.def("empty_nhwc(Tensor like, int[] shape) -> Tensor");

  // Fills z, contiguous and float32 or float64, with the numbers that torch.randn draws in float64 from a CPU generator of
  // this seed, but for the rounding of float64.
  m.def("gaussian_(Tensor(a!) z, int seed) -> ()");

  // The same on a GPU, for many tensors at once.
  m.def("gaussians(Tensor(a!)[] z, int[] seeds) -> ()");
  // Orthogonalises on a GPU: z and q are matrices, or batches (batch, rows, columns) of them, of any strides, float32 or
  // float64; q may be z. A matrix with more columns than rows is transposed before and after. q becomes scale times the
  // factor of QR with a positive diagonal of R; v becomes the Householder reflectors, of any lengths, or is empty.
  m.def("householder(Tensor[] z, Tensor(a!)[] q, Tensor(b!)[] v, float[] scales) -> ()");
  // Run the same kernels on the host, slowly, for tests. `backwards` reverses the order in which blocks, and the threads
  // of a block, take their turns; the order must not change the result.
  m.def("gaussians_emulated(Tensor(a!)[] z, int[] seeds, bool backwards) -> ()");
  m.def("householder_emulated(Tensor[] z, Tensor(a!)[] q, Tensor(b!)[] v, float[] scales, bool backwards) -> ()");
}

STABLE_TORCH_LIBRARY_FRAGMENT(nasfast, m) {
  // conv_bn_act_chain on a GPU in csrc/gpu, without running statistics, into memory of the caller; also for CPU tensors,
  // where the kernels are emulated, for tests. nasfast/ops/chain/cuda.py makes operators of the schemas above from these.
  // Behind mean and variance, statistics has the coefficients of forward (csrc/gpu/call.cpp).
  //   counters: as many zeros as conv_bn_act_chain_gpu_counters says, int32; they are zeros again after the launches.
  //   added: is added to the result, or null.
  //   deferred_input: empty if x is there. Otherwise the tensors of DeferredResult in nasfast/ops/chain/deferred.py, from
  //     which x is computed and written.
  //   deferred_norm: empty if y is wanted. Otherwise the fields of DeferredNorm there, of which all but the last two
  //     are written. `saved` then ends before the output of the last convolution.
  m.def("conv_bn_act_chain_gpu_counters(Tensor x, int[] plan) -> int");
  m.def(
      "conv_bn_act_chain_gpu_fwd(Tensor(e!) x, Tensor[] conv_weights, Tensor[] bn_weights, Tensor[] bn_biases, "
      "Tensor? added, Tensor(a!) y, Tensor(b!) saved, Tensor(c!) statistics, Tensor(d!) counters, "
      "Tensor[] deferred_input, Tensor(f!)[] deferred_norm, int[] plan, float[] eps) -> ()");
  // Writes x by itself.
  m.def("conv_bn_act_chain_gpu_apply(Tensor(a!) x, Tensor[] deferred_input) -> ()");
  // Writes the last two fields of a DeferredNorm from the others and grad, the gradient of the result. It needs as many
  // counters as conv_bn_act_chain_gpu_counters says of grad and an empty plan.
  m.def("conv_bn_act_chain_gpu_reduce(Tensor grad, Tensor(a!)[] deferred_norm, Tensor(b!) counters) -> ()");
  // Without dx, dweights and dbiases that are empty, their gradients are not wanted.
  //   input_norm: empty, or the DeferredNorm in front of x, whose last two fields this call then writes.
  //   deferred_norm: the DeferredNorm of this chain, or empty.
  m.def(
      "conv_bn_act_chain_gpu_bwd(Tensor grad, Tensor saved, Tensor statistics, Tensor[] conv_weights, "
      "Tensor[] bn_weights, bool add_input, Tensor(a!)? dx, Tensor(b!)[] dweights, Tensor(c!)[] dbiases, "
      "Tensor(d!) counters, Tensor(e!)[] input_norm, Tensor[] deferred_norm, int[] plan, float[] eps) -> ()");
}
