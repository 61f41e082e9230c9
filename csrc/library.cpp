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
}
