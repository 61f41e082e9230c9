// Launchers of mixed_bn on the CPU and their registration: checks, the arithmetic per channel between the phases, and
// parallel loops.

#include "mixed_bn.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "launch.h"

namespace nasfast::cpu {

namespace {

const std::string kOp = "mixed_bn";
// From this many channels on, most of a pixel is whole vectors. With fewer, a row of the kernels is several pixels.
constexpr int64_t kWideChannels = 64;
// Gradients of this many bytes have left the cache when they are read again, so they are written past it.
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;

// One call: the parameters of the kernels, and the arrays that they point to.
class Work {
 public:
  MixedBnParams params{};

  Work(const std::vector<Tensor>& xs, const Tensor& gates, const std::vector<bool>& normalize)
      : count_(static_cast<int64_t>(xs.size())) {
    STD_TORCH_CHECK(count_ > 0 && normalize.size() == xs.size(), kOp,
                    ": needs one flag for each of at least one tensor");
    const Tensor& x = xs[0];
    check_image_type(kOp, x.scalar_type());
    for (const Tensor& other : xs) {
      check_image(kOp, "xs", other, sizes_of(x), x.scalar_type());
      xs_.push_back(other.const_data_ptr());
    }
    check_vector(kOp, "gates", gates, count_, ScalarType::Float);
    gates_ = float_data(gates);

    const int64_t channels = x.size(1);
    pixels_ = x.size(0) * x.size(2) * x.size(3);
    params.bfloat16 = x.scalar_type() == ScalarType::BFloat16;
    params.count = count_;
    params.channels = channels;
    params.phases = channels < kWideChannels ? kAlignment / std::gcd(channels, kAlignment) : 1;
    params.width = params.phases * channels;
    const RowItems rows((pixels_ + params.phases - 1) / params.phases);
    params.rows = rows.rows;
    params.last_width = params.width - (params.rows * params.phases - pixels_) * channels;
    params.item_rows = rows.item_rows;
    params.items = rows.items;
    params.xs = xs_.data();
    for (int64_t k = 0; k < count_; ++k) {
      normalize_.push_back(normalize[k]);
      if (normalize[k]) measured_.push_back(k);
    }
    params.normalize = normalize_.data();
    params.measured = measured_.data();

    // one BatchNorm for the channels of all measured tensors, one tensor after the other, with the gates as weights
    const int64_t all = measured() * channels;
    bn_ = std::make_unique<BatchNorm>(Act::kIdentity, all);
    for (int64_t k : measured_) weights_.insert(weights_.end(), channels, gates_[k]);
    biases_.assign(all, 0);
  }

  int64_t measured() const { return static_cast<int64_t>(measured_.size()); }
  int64_t pixels() const { return pixels_; }

  // Writes mean and biased variance of every measured tensor to statistics [measured][2][channel].
  void measure(double* statistics) {
    const int64_t channels = params.channels;
    std::vector<double> partial(measured() * params.items * 2 * channels);
    params.partial = partial.data();
    run(kernels().mixed.mixed_bn_stats, measured() * params.items, 1);
    const auto group_count = [&](int64_t item) {
      const int64_t first = item * params.item_rows * params.phases;
      return std::min(params.item_rows * params.phases, pixels_ - first);
    };
    for (int64_t i = 0; i < measured(); ++i) {
      double* mean = statistics + i * 2 * channels;
      BatchNorm::join(partial.data() + i * params.items * 2 * channels, params.items, channels, group_count, mean,
                      mean + channels);
    }
  }

  void set_statistics(const double* statistics, double eps) {
    const int64_t channels = params.channels;
    std::vector<double> mean(weights_.size()), var(weights_.size());
    for (int64_t i = 0; i < measured(); ++i) {
      const double* from = statistics + i * 2 * channels;
      std::copy(from, from + channels, mean.begin() + i * channels);
      std::copy(from + channels, from + 2 * channels, var.begin() + i * channels);
    }
    bn_->set_statistics(mean.data(), var.data(), eps, weights_.data(), biases_.data());
    spread();
  }

  // Makes the gradients of the gates (null: not wanted) and the coefficients of dx, from the sums of
  // mixed_bn_bwd_reduce.
  void set_gradient_sums(const double* sums, float* dgates) {
    const int64_t channels = params.channels;
    const int64_t all = measured() * channels;
    std::vector<double> partial(2 * all);
    for (int64_t i = 0; i < measured(); ++i) {
      const double* moment = sums + (1 + measured_[i]) * channels;
      std::copy(sums, sums + channels, partial.begin() + i * channels);
      std::copy(moment, moment + channels, partial.begin() + all + i * channels);
    }
    std::vector<float> dweight(all);
    bn_->set_gradient_sums(partial, 1, pixels_, true, dweight.data(), nullptr);
    spread();
    if (!dgates) return;
    const float* next = dweight.data();
    for (int64_t k = 0; k < count_; ++k) {
      double sum = 0;
      if (normalize_[k]) {
        for (int64_t c = 0; c < channels; ++c) sum += *next++;
      } else {
        for (int64_t c = 0; c < channels; ++c) sum += sums[(1 + k) * channels + c];
      }
      dgates[k] = static_cast<float>(sum);
    }
  }

  // Runs a phase over items that read `tensors` tensors each.
  void run(MixedBnPhase phase, int64_t items, int64_t tensors) const {
    const int64_t elements = params.item_rows * params.width * tensors;
    run_items(items, elements, [&](int64_t begin, int64_t end) { phase(params, begin, end); });
  }

 private:
  // Writes the coefficients in the layout that the kernels read: repeated for each of the pixels of a row.
  void spread() {
    constexpr int kArrays = 5;
    const int64_t channels = params.channels;
    const int64_t stride = round_up(params.width, kAlignment);
    if (folds_.empty()) {
      storage_ = std::make_unique<AlignedFloats>(count_ * kArrays * stride);
      for (int64_t k = 0; k < count_; ++k) {
        const float* start = storage_->data() + k * kArrays * stride;
        folds_.push_back(
            {start, start + stride, start + 2 * stride, start + 3 * stride, start + 4 * stride, Act::kIdentity});
      }
      params.folds = folds_.data();
    }
    const BnFold& bn = bn_->fold();
    const float* arrays[kArrays] = {bn.center, bn.scale, bn.shift, bn.slope, bn.offset};
    std::vector<double> shift(channels);
    int64_t i = 0;
    for (int64_t k = 0; k < count_; ++k) {
      float* to = storage_->data() + k * kArrays * stride;
      for (int array = 0; array < kArrays && normalize_[k]; ++array) {
        for (int64_t at = 0; at < params.width; at += channels) {
          std::copy_n(arrays[array] + i * channels, channels, to + array * stride + at);
        }
      }
      if (normalize_[k]) {
        for (int64_t c = 0; c < channels; ++c) shift[c] += bn.shift[i * channels + c];
        ++i;
      } else {
        std::fill_n(to + stride, params.width, gates_[k]);
      }
    }
    for (int64_t at = 0; at < params.width; ++at) {
      storage_->data()[2 * stride + at] = static_cast<float>(shift[at % channels]);
    }
  }

  int64_t count_, pixels_;
  const float* gates_;
  std::vector<const void*> xs_;
  std::vector<char> normalize_;
  std::vector<int64_t> measured_;
  std::vector<float> weights_, biases_;
  std::unique_ptr<BatchNorm> bn_;
  std::unique_ptr<AlignedFloats> storage_;
  std::vector<BnFold> folds_;
};

std::tuple<Tensor, Tensor> mixed_bn_fwd_cpu(std::vector<Tensor> xs, const Tensor& gates, std::vector<bool> normalize,
                                            double eps) {
  Work work(xs, gates, normalize);
  STD_TORCH_CHECK(work.measured() == 0 || work.pixels() > 0, kOp, ": cannot take batch statistics of an empty batch");
  Tensor y = pool_empty_like(xs[0]);
  Tensor statistics = empty_vector(gates, work.measured() * 2 * work.params.channels, ScalarType::Double);
  double* values = static_cast<double*>(statistics.mutable_data_ptr());
  work.measure(values);
  work.set_statistics(values, eps);
  work.params.y = y.mutable_data_ptr();
  work.run(kernels().mixed.mixed_bn_fwd, work.params.items, work.params.count);
  return {y, statistics};
}

std::tuple<std::vector<Tensor>, Tensor> mixed_bn_bwd_cpu(const Tensor& grad, std::vector<Tensor> xs,
                                                         const Tensor& gates, const Tensor& statistics,
                                                         std::vector<bool> normalize, double eps,
                                                         std::vector<bool> wants) {
  Work work(xs, gates, normalize);
  check_image(kOp, "grad", grad, sizes_of(xs[0]), xs[0].scalar_type());
  const int64_t count = work.params.count;
  const int64_t channels = work.params.channels;
  check_vector(kOp, "statistics", statistics, work.measured() * 2 * channels, ScalarType::Double);
  STD_TORCH_CHECK(static_cast<int64_t>(wants.size()) == count + 1, kOp,
                  ": wants must have one flag per tensor and one for gates");
  work.params.grad = grad.const_data_ptr();
  work.set_statistics(double_data(statistics), eps);

  const bool want_gates = wants[count];
  std::vector<Tensor> results;
  std::vector<void*> dxs;
  std::vector<char> in_sums;
  bool any_sums = false;
  bool any_dx = false;
  int64_t written = 0;
  for (int64_t k = 0; k < count; ++k) {
    results.push_back(wants[k] ? pool_empty_like(xs[k]) : empty_vector(xs[k], 0, xs[k].scalar_type()));
    dxs.push_back(wants[k] ? results.back().mutable_data_ptr() : nullptr);
    in_sums.push_back(want_gates || (wants[k] && normalize[k]));
    any_sums = any_sums || in_sums.back();
    any_dx = any_dx || wants[k];
    written += wants[k] ? work.pixels() * channels : 0;
  }
  Tensor dgates = empty_vector(gates, want_gates ? count : 0, ScalarType::Float);
  if (any_sums) {
    const int64_t size = (1 + count) * channels;
    std::vector<double> partial(std::max<int64_t>(1, work.params.items) * size);
    work.params.partial = partial.data();
    work.params.in_sums = in_sums.data();
    work.run(kernels().mixed.mixed_bn_bwd_reduce, work.params.items, count);
    add_groups(partial.data(), work.params.items, size);
    work.set_gradient_sums(partial.data(), want_gates ? static_cast<float*>(dgates.mutable_data_ptr()) : nullptr);
  }
  if (any_dx) {
    work.params.dxs = dxs.data();
    work.params.streams = !work.params.bfloat16 && work.params.width % kAlignment == 0 && written * 4 >= kStreamBytes;
    work.run(kernels().mixed.mixed_bn_bwd, work.params.items, count);
  }
  return {results, dgates};
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("mixed_bn_fwd", TORCH_BOX(&nasfast::cpu::mixed_bn_fwd_cpu));
  m.impl("mixed_bn_bwd", TORCH_BOX(&nasfast::cpu::mixed_bn_bwd_cpu));
}
