// Every operator schema of nasfast. Kernels register beside their code; fake and autograd are in nasfast/ops.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(nasfast, m) {
  // Formula: nasfast/ops/reference.py, bn_act. x is dense NCHW or NHWC, and y, residual, grad and dx have its layout and
  // type. Without running statistics those of the batch are used and returned (float64, biased var); otherwise mean and var
  // come back empty.
  m.def(
      "bn_act_fwd(Tensor x, Tensor weight, Tensor bias, Tensor? residual, Tensor? running_mean, Tensor? running_var, "
      "float eps, str act) -> (Tensor y, Tensor mean, Tensor var)");
  // mean and var are those forward used; batch_statistics says whether they depend on x. What is not wanted comes back
  // empty.
  m.def(
      "bn_act_bwd(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor var, float eps, str act, "
      "bool batch_statistics, bool want_x, bool want_weight, bool want_bias) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)");

  // Formula: nasfast/ops/reference.py, mixed_bn. xs are NHWC, of one shape and type, and y, grad and dxs are likewise;
  // statistics are mean and biased var of those that are normalised, [tensor][2][channel], float64.
  m.def("mixed_bn_fwd(Tensor[] xs, Tensor gates, bool[] normalize, float eps) -> (Tensor y, Tensor statistics)");
  // wants: of each dx, and of dgates; what is not wanted comes back empty.
  m.def(
      "mixed_bn_bwd(Tensor grad, Tensor[] xs, Tensor gates, Tensor statistics, bool[] normalize, float eps, bool[] wants) "
      "-> (Tensor[] dxs, Tensor dgates)");

  // A chain of stages, each a convolution without bias, BatchNorm, activation: formula in nasfast/ops/reference.py,
  // conv_bn_act_chain. A stage is pointwise (stride 1), depthwise (kernel 3, 5 or 7, stride 1 or 2, padding kernel / 2), or, as
  // the first one, dense; acts are joined by commas. x is NHWC, and y, residual, grad and dx are laid out likewise.
  // Empty running statistics mean those of the batch. add_input adds x to the result. `one_pass`: the first two stages are
  // pointwise and depthwise, and backward goes through both at once, for which it gets x; the C++ kernels then compute the
  // output of the first again instead of keeping it. `shuffle`: the stages
  // run on the odd channels of x, and y is the even ones followed by their result.
  // Returned: y; what backward needs beside x, opaque, and empty without `keep`; mean and biased var of all
  // stages, [stage][2][channel], float64, after which the Triton kernels keep numbers of their own.
  m.def(
      "conv_bn_act_fwd(Tensor x, Tensor[] conv_weights, Tensor[] bn_weights, Tensor[] bn_biases, Tensor[] running_means, "
      "Tensor[] running_vars, Tensor? residual, int[] strides, str acts, float[] eps, bool add_input, bool one_pass, "
      "bool shuffle, bool keep) "
      "-> (Tensor y, Tensor saved, Tensor statistics)");
  // shape: of x, which is passed only with `one_pass`. wants: of dx, and of each stage's bn_weight and bn_bias; what is not
  // wanted comes back empty.
  m.def(
      "conv_bn_act_bwd(Tensor grad, Tensor? x, int[] shape, Tensor saved, Tensor statistics, Tensor[] conv_weights, Tensor[] bn_weights, "
      "Tensor[] bn_biases, bool[] batch_statistics, int[] strides, str acts, float[] eps, bool add_input, bool one_pass, "
      "bool shuffle, bool[] wants) -> (Tensor dx, Tensor[] dweights, Tensor[] dbiases)");

  // Formula: nasfast/ops/reference.py, depthwise_conv2d. x is NHWC, and y, grad and dx are laid out likewise; weight and
  // dweight are (C, 1, k, k), contiguous, float32.
  m.def("depthwise_conv2d_fwd(Tensor x, Tensor weight, int stride, int dilation) -> Tensor y");
  // shape: of x, which is passed only with want_weight. What is not wanted comes back empty.
  m.def(
      "depthwise_conv2d_bwd(Tensor grad, Tensor? x, int[] shape, Tensor weight, int stride, int dilation, bool want_x, "
      "bool want_weight) -> (Tensor dx, Tensor dweight)");

  // Formula: nasfast/ops/reference.py, pool_3x3. x is NHWC, and y, index, grad and dx are laid out likewise. kind is max or
  // avg. index: of each maximum its place in the window, 3 * row + column, uint8; empty for avg and without `keep`.
  m.def("pool_3x3_fwd(Tensor x, str kind, int stride, bool keep) -> (Tensor y, Tensor index)");
  // shape: of x
  m.def("pool_3x3_bwd(Tensor grad, Tensor index, int[] shape, str kind, int stride) -> Tensor dx");

  // Formula: nasfast/ops/reference.py, orthogonalize. Entries are (..., rows, columns), float32 or float64.
  m.def("orthogonalize(Tensor[] matrices) -> Tensor[]");
  // The CUDA kernels of orthogonalize on the host, for tests; slow. `backwards` reverses the order in which the threads of
  // a block take their turns, which must change nothing.
  m.def("orthogonalize_emulated(Tensor[] matrices, bool backwards) -> Tensor[]");
}
