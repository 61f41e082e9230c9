// What the launchers of all operators use: checks, aligned memory, parallel loops over items, and the arithmetic of a
// BatchNorm between the phases.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "params.h"

namespace nasfast::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Most blocks of rows per NHWC tensor: enough for the cores of a large machine to share evenly, few enough that their
// partial sums are small beside the tensor.
constexpr int64_t kMaxItems = 128;
// Fewest rows per block: one tile of the kernels.
constexpr int64_t kMinItemRows = 64;
// Strips of images for the threads to share, see `Strips`.
constexpr int64_t kMinStrips = 16;
// Elements below which a second thread costs more than it saves.
constexpr int64_t kParallelElements = 16384;
// Floats in the widest vector. Arrays with one element per channel start at a multiple of this, because they are read
// once per vector of data, and a load across two cache lines costs double.
constexpr int64_t kAlignment = 16;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// An array of zeros aligned to kAlignment floats.
class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t size) : storage_(size + kAlignment) {
    void* start = storage_.data();
    size_t space = storage_.size() * sizeof(float);
    data_ = static_cast<float*>(std::align(kAlignment * sizeof(float), size * sizeof(float), start, space));
  }
  AlignedFloats(const AlignedFloats&) = delete;
  AlignedFloats& operator=(const AlignedFloats&) = delete;
  AlignedFloats(AlignedFloats&&) = default;
  float* data() const { return data_; }

 private:
  std::vector<float> storage_;
  float* data_;
};

// How rows (the pixels in NHWC) are divided into items of work; this does not depend on the number of threads.
struct RowItems {
  int64_t rows;
  int64_t item_rows;
  int64_t items;
  explicit RowItems(int64_t rows);
  int64_t count(int64_t item) const { return std::min(item_rows, rows - item * item_rows); }
};

// How images are divided into strips of rows for the threads to share; this does not depend on the number of threads.
struct Strips {
  int64_t strips, strip_rows;
  // at least `least` of them, if their images are high enough
  Strips(int64_t batch, int64_t height, int64_t least = kMinStrips);
};

// Strips for the present threads, whose results do not depend on how they are divided: fewer than kMinStrips, as each
// computes the rows at its upper edge again.
int64_t strips_for_threads();

// Calls phase(begin, end) in parallel over items of about item_elements elements each.
template <typename Phase>
void run_items(int64_t items, int64_t item_elements, const Phase& phase) {
  const int64_t grain = std::max<int64_t>(1, kParallelElements / std::max<int64_t>(1, item_elements));
  torch::stable::parallel_for(0, items, grain, phase);
}

// Adds partial [group][size] over the groups; the sum is in the first group.
void add_groups(double* partial, int64_t groups, int64_t size);

// The activation of this name; `op` refuses others.
Act parse_act(const std::string& op, const std::string& act);

// The arithmetic of one BatchNorm between the phases.
class BatchNorm {
 public:
  BatchNorm(Act act, int64_t channels);

  const BnFold& fold() const { return fold_; }

  // Joins the partial statistics [group][2][channel] of groups of count(group) values to mean and biased variance.
  template <typename GroupCount>
  static void join(const double* partial, int64_t groups, int64_t channels, const GroupCount& count, double* mean,
                   double* var) {
    std::fill(mean, mean + channels, 0.0);
    std::fill(var, var + channels, 0.0);
    double before = 0;
    for (int64_t group = 0; group < groups; ++group) {
      const double here = static_cast<double>(count(group));
      const double share = here / (before + here);
      const double* group_mean = partial + group * 2 * channels;
      const double* group_m2 = group_mean + channels;
      for (int64_t c = 0; c < channels; ++c) {
        const double delta = group_mean[c] - mean[c];
        mean[c] += delta * share;
        var[c] += group_m2[c] + delta * delta * before * share;
      }
      before += here;
    }
    for (int64_t c = 0; c < channels; ++c) var[c] /= before;
  }

  // Sets center, scale and shift. S is float or double.
  template <typename S>
  void set_statistics(const S* mean, const S* var, double eps, const float* weight, const float* bias) {
    for (int64_t c = 0; c < channels_; ++c) set_channel(c, mean[c], var[c], eps, weight[c], bias[c]);
  }

  // Adds up partial [group][2][channel], which has sum dz and sum dz * (y - center). Writes the affine gradients (null:
  // not wanted). When the statistics are those of a batch of `rows` values, also sets slope and offset.
  void set_gradient_sums(std::vector<double>& partial, int64_t groups, int64_t rows, bool batch_statistics,
                         float* dweight, float* dbias);

 private:
  void set_channel(int64_t c, double mean, double var, double eps, double weight, double bias);

  int64_t channels_;
  AlignedFloats storage_;
  BnFold fold_;
  std::vector<double> rest_;   // mean - center
  std::vector<double> rstd_;   // 1 / sqrt(var + eps)
  std::vector<double> scale_;  // weight * rstd
};

// The distance in elements between the pixels of x, if these are channels_last; `is_channels_last` checks that.
int64_t row_distance(const Tensor& x);

// Whether memory order is N, H, W, C with `ld` elements between pixels (0: C); dimensions of size 1 may have any stride.
bool is_channels_last(const Tensor& x, int64_t ld = 0);

std::vector<int64_t> sizes_of(const Tensor& x);

// Refuse what would corrupt memory. nasfast/ops checks the same before, with explanations for the user.
// Images have `ld` elements between pixels, as in is_channels_last().
void check_image_type(const std::string& op, ScalarType type);
void check_image(const std::string& op, const char* name, const Tensor& image, const std::vector<int64_t>& sizes,
                 ScalarType type, int64_t ld = 0);
void check_vector(const std::string& op, const char* name, const Tensor& vector, int64_t channels, ScalarType type);

inline const float* float_data(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }
inline const double* double_data(const Tensor& tensor) { return static_cast<const double*>(tensor.const_data_ptr()); }

// A depthwise filter [channel][kernel^2] in the layout that the kernels read, [kernel^2][image][channel], for images that
// share a vector. Flipped for the gradient of the input.
AlignedFloats pack_filter(const float* filter, int64_t channels, int64_t kernel, bool flipped, int64_t images = 1);

// An uninitialised tensor in recycled memory (pool.h).
Tensor pool_empty(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type);

// An uninitialised tensor (N, C, H, W) in channels_last.
Tensor channels_last_empty(const std::vector<int64_t>& sizes, ScalarType type);

// An uninitialised tensor with the shape, type and memory format of x.
Tensor pool_empty_like(const Tensor& x);

inline Tensor empty_vector(const Tensor& like, int64_t size, ScalarType type) {
  return torch::stable::new_empty(like, {size}, type);
}

}  // namespace nasfast::cpu
