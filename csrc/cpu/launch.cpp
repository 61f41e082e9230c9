#include "launch.h"

#include <algorithm>
#include <cmath>

#include "pool.h"

namespace nasfast::cpu {
namespace {

// Each strip of an image computes the rows at its upper edge again. So images are divided only when there are fewer
// than enough strips for the threads to share, and into strips of at least kMinStripRows rows.
constexpr int64_t kMinStripRows = 8;

}  // namespace

Act parse_act(const std::string& op, const std::string& act) {
  if (act == "identity") return Act::kIdentity;
  if (act == "relu") return Act::kRelu;
  if (act == "relu6") return Act::kRelu6;
  if (act == "tanh") return Act::kTanh;
  if (act == "hswish") return Act::kHswish;
  if (act == "silu") return Act::kSilu;
  STD_TORCH_CHECK(false, op, ": act must be identity, relu, relu6, tanh, hswish or silu, got ", act);
}

RowItems::RowItems(int64_t total) : rows(total) {
  item_rows = round_up(std::max(kMinItemRows, (rows + kMaxItems - 1) / kMaxItems), kMinItemRows);
  items = (rows + item_rows - 1) / item_rows;
}

Strips::Strips(int64_t batch, int64_t height, int64_t least) {
  const int64_t per_image = (least + batch - 1) / batch;
  const int64_t most = std::max<int64_t>(1, height / kMinStripRows);
  strip_rows = (height + std::min(per_image, most) - 1) / std::min(per_image, most);
  strips = (height + strip_rows - 1) / strip_rows;
}

int64_t strips_for_threads() {
  const int64_t threads = torch::stable::get_num_threads();
  return threads == 1 ? 1 : std::min(kMinStrips, 4 * threads);
}

void add_groups(double* partial, int64_t groups, int64_t size) {
  for (int64_t group = 1; group < groups; ++group) {
    for (int64_t i = 0; i < size; ++i) partial[i] += partial[group * size + i];
  }
}

BatchNorm::BatchNorm(Act act, int64_t channels)
    : channels_(channels),
      storage_(5 * round_up(channels, kAlignment)),
      rest_(channels),
      rstd_(channels),
      scale_(channels) {
  const int64_t stride = round_up(channels, kAlignment);
  const float* start = storage_.data();
  fold_ = {start, start + stride, start + 2 * stride, start + 3 * stride, start + 4 * stride, act};
}

void BatchNorm::set_channel(int64_t c, double mean, double var, double eps, double weight, double bias) {
  const int64_t stride = fold_.scale - fold_.center;
  float* center = storage_.data() + c;
  rstd_[c] = 1 / std::sqrt(var + eps);
  scale_[c] = weight * rstd_[c];
  *center = static_cast<float>(mean);
  rest_[c] = mean - *center;
  center[stride] = static_cast<float>(scale_[c]);
  center[2 * stride] = static_cast<float>(bias - rest_[c] * scale_[c]);
}

void BatchNorm::set_gradient_sums(std::vector<double>& partial, int64_t groups, int64_t rows, bool batch_statistics,
                                  float* dweight, float* dbias) {
  add_groups(partial.data(), groups, 2 * channels_);
  const int64_t stride = fold_.scale - fold_.center;
  float* slope = storage_.data() + 3 * stride;
  float* offset = slope + stride;
  const double count = static_cast<double>(rows);
  for (int64_t c = 0; c < channels_; ++c) {
    const double sum_dz = partial[c];
    // an infinity is already in both sums, and a rest of 0 times it would be NaN
    const double correction = std::isfinite(sum_dz) ? rest_[c] * sum_dz : 0;
    const double sum_dz_xhat = (partial[channels_ + c] - correction) * rstd_[c];
    if (dbias) dbias[c] = static_cast<float>(sum_dz);
    if (dweight) dweight[c] = static_cast<float>(sum_dz_xhat);
    if (!batch_statistics) continue;
    // dx = scale * (dz - mean(dz) - xhat * mean(dz * xhat)), xhat = (x - center - rest) * rstd
    const double full_slope = -scale_[c] * rstd_[c] * sum_dz_xhat / count;
    slope[c] = static_cast<float>(full_slope);
    offset[c] = static_cast<float>(-scale_[c] * sum_dz / count - full_slope * rest_[c]);
  }
}

AlignedFloats pack_filter(const float* filter, int64_t channels, int64_t kernel, bool flipped, int64_t images) {
  const int64_t taps = kernel * kernel, ld = round_up(images * channels, kAlignment);
  AlignedFloats packed(taps * ld);
  for (int64_t t = 0; t < taps; ++t) {
    float* to = packed.data() + (flipped ? taps - 1 - t : t) * ld;
    for (int64_t i = 0; i < images; ++i) {
      for (int64_t c = 0; c < channels; ++c) to[i * channels + c] = filter[c * taps + t];
    }
  }
  return packed;
}

int64_t row_distance(const Tensor& x) {
  if (x.dim() != 4) return 0;
  for (int64_t dim : {3, 2, 0}) {
    if (x.size(dim) != 1) return x.stride(dim);
  }
  return x.size(1);  // one pixel
}

bool is_channels_last(const Tensor& x, int64_t ld) {
  if (x.numel() == 0) return true;  // as in PyTorch
  if (ld == 0) ld = x.size(1);
  if (ld < x.size(1) || (x.size(1) != 1 && x.stride(1) != 1)) return false;
  int64_t expected = ld;
  for (int64_t dim : {3, 2, 0}) {
    if (x.size(dim) != 1 && x.stride(dim) != expected) return false;
    expected *= x.size(dim);
  }
  return true;
}

Tensor pool_empty(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  const int64_t element_size = type == ScalarType::Byte ? 1 : type == ScalarType::BFloat16 ? 2 : 4;
  void* data = pool_allocate(count * element_size);
  return torch::stable::from_blob(data, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU), type,
                                  pool_free);
}

Tensor channels_last_empty(const std::vector<int64_t>& sizes, ScalarType type) {
  const int64_t row = sizes[3] * sizes[1];
  return pool_empty(sizes, {sizes[2] * row, 1, row, sizes[1]}, type);
}

Tensor pool_empty_like(const Tensor& x) {
  std::vector<int64_t> strides;
  for (int64_t dim = 0; dim < x.dim(); ++dim) strides.push_back(x.stride(dim));
  return pool_empty(sizes_of(x), strides, x.scalar_type());
}

std::vector<int64_t> sizes_of(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < x.dim(); ++dim) sizes.push_back(x.size(dim));
  return sizes;
}

void check_image_type(const std::string& op, ScalarType type) {
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op,
                  ": images must be float32 or bfloat16");
}

void check_image(const std::string& op, const char* name, const Tensor& image, const std::vector<int64_t>& sizes,
                 ScalarType type, int64_t ld) {
  if (image.dim() == 4 && sizes_of(image) == sizes && is_channels_last(image, ld) && image.scalar_type() == type)
    return;
  std::string shape;
  for (int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  STD_TORCH_CHECK(false, op, ": ", name, " must be channels_last, of the documented type and of shape (", shape, ")");
}

void check_vector(const std::string& op, const char* name, const Tensor& vector, int64_t channels, ScalarType type) {
  STD_TORCH_CHECK(
      vector.dim() == 1 && vector.size(0) == channels && vector.is_contiguous() && vector.scalar_type() == type, op,
      ": ", name, " must be a contiguous vector of ", channels, " elements of the documented type");
}

}  // namespace nasfast::cpu
