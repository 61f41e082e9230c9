// Kernels of squeeze_excite, compiled once per instruction set.

#include "simd.h"
#include "squeeze_excite.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

// Sums are float within so many pixels, and double beyond.
constexpr int64_t kFloatPixels = 64;

// Sums of kVectors vectors of channels over the pixels of one image. kVectors chains of additions hide their latency.
template <int kVectors, typename T, typename Lanes>
void add_pixels(const T* x, const T* y, int64_t pixels, int64_t channels, float* sums, Lanes lanes) {
  double total[kVectors * kLanes] = {};
  for (int64_t first = 0; first < pixels; first += kFloatPixels) {
    const int64_t end = first + kFloatPixels < pixels ? first + kFloatPixels : pixels;
    VecF here[kVectors] = {};
    for (int64_t pixel = first; pixel < end; ++pixel) {
      const int64_t at = pixel * channels;
      for (int v = 0; v < kVectors; ++v) {
        const VecF value = load(x + at + v * kLanes, lanes);
        here[v] += y == nullptr ? value : value * load(y + at + v * kLanes, lanes);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < kLanes; ++i) total[v * kLanes + i] += here[v][i];
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    VecF sum;
    for (int i = 0; i < kLanes; ++i) sum[i] = static_cast<float>(total[v * kLanes + i]);
    store(sums + v * kLanes, sum, lanes);
  }
}

template <typename T>
void sums_as(const ImageSumsParams& p, int64_t begin, int64_t end) {
  constexpr int64_t kWide = 4 * kLanes;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / p.blocks;
    int64_t c = item % p.blocks * kSumChannels;
    const int64_t last = c + kSumChannels < p.channels ? c + kSumChannels : p.channels;
    const T* x = static_cast<const T*>(p.x) + image * p.pixels * p.channels;
    const T* y = p.y == nullptr ? nullptr : static_cast<const T*>(p.y) + image * p.pixels * p.channels;
    float* sums = p.sums + image * p.channels;
    const auto other = [&](int64_t at) { return y == nullptr ? nullptr : y + at; };
    for (; c + kWide <= last; c += kWide) add_pixels<4>(x + c, other(c), p.pixels, p.channels, sums + c, AllLanes{});
    for_each_vector(last - c, [&](int64_t i, auto lanes) {
      add_pixels<1>(x + c + i, other(c + i), p.pixels, p.channels, sums + c + i, lanes);
    });
  }
}

template <typename T>
void scale_as(const ImageScaleParams& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / p.strips;
    const int64_t first = item % p.strips * p.strip_pixels;
    const int64_t last = first + p.strip_pixels < p.pixels ? first + p.strip_pixels : p.pixels;
    const float* scale = p.scale + image * p.channels;
    const float* shift = p.shift == nullptr ? nullptr : p.shift + image * p.channels;
    for (int64_t pixel = first; pixel < last; ++pixel) {
      const int64_t at = (image * p.pixels + pixel) * p.channels;
      const T* x = static_cast<const T*>(p.x) + at;
      T* out = static_cast<T*>(p.out) + at;
      for_each_vector(p.channels, [&](int64_t c, auto lanes) {
        const VecF product = load(x + c, lanes) * load(scale + c, lanes);
        store(out + c, shift == nullptr ? product : product + load(shift + c, lanes), lanes);
      });
    }
  }
}

void sums(const ImageSumsParams& params, int64_t begin, int64_t end) {
  if (params.bfloat16) {
    sums_as<BFloat16>(params, begin, end);
  } else {
    sums_as<float>(params, begin, end);
  }
}

void scale(const ImageScaleParams& params, int64_t begin, int64_t end) {
  if (params.bfloat16) {
    scale_as<BFloat16>(params, begin, end);
  } else {
    scale_as<float>(params, begin, end);
  }
}

}  // namespace

extern const SqueezeExciteKernels kSqueezeExciteKernels = {sums, scale};

}  // namespace nasfast::cpu::NASFAST_ISA
