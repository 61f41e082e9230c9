// Kernels of gaussian_, compiled once per instruction set. The compiler makes vectors of the loops.

#include "gaussian.h"

#include <algorithm>
#include <cmath>

#include "../orthogonal/gaussian.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

using namespace orthogonal;

class Twister {
 public:
  explicit Twister(uint32_t seed) {
    words_[0] = seed;
    for (int i = 0; i + 1 < kWords; ++i) words_[i + 1] = seeded_word(words_[i], i);
  }

  void uniforms(double* out, int count) {
    for (int done = 0; done < count;) {
      if (at_ == kUniforms) turn();
      const int some = std::min(count - done, kUniforms - at_);
      std::copy_n(uniforms_ + at_, some, out + done);
      done += some;
      at_ += some;
    }
  }

 private:
  void turn() {
    uint32_t* const w = words_;
    for (int i = 0; i < kWords - kShift; ++i) w[i] = twisted(w[i], w[i + 1], w[i + kShift]);
    for (int i = kWords - kShift; i + 1 < kWords; ++i) w[i] = twisted(w[i], w[i + 1], w[i + kShift - kWords]);
    w[kWords - 1] = twisted(w[kWords - 1], w[0], w[kShift - 1]);
    uint32_t random[kWords];
    for (int i = 0; i < kWords; ++i) random[i] = tempered(w[i]);
    for (int i = 0; i < kUniforms; ++i) uniforms_[i] = uniform(random[2 * i], random[2 * i + 1]);
    at_ = 0;
  }

  uint32_t words_[kWords];
  double uniforms_[kUniforms];
  int at_ = kUniforms;
};

template <typename T>
void fill_block(const double* u, T* z) {
  constexpr int kHalf = kBlock / 2;
  double radii[kHalf];
  for (int i = 0; i < kHalf; ++i) radii[i] = std::sqrt(-2 * logarithm(1 - u[i]));
  for (int i = 0; i < kHalf; ++i) {
    double cosine, sine;
    on_circle(radii[i], u[i + kHalf], &cosine, &sine);
    z[i] = static_cast<T>(cosine);
    z[i + kHalf] = static_cast<T>(sine);
  }
}

// Fewer numbers than a block are drawn pair by pair, the angle first.
template <typename T>
void fill_pairs(Twister& twister, T* z, int count) {
  for (int i = 0; i < count; i += 2) {
    double u[2], cosine, sine;
    twister.uniforms(u, 2);
    on_circle(std::sqrt(-2 * logarithm(1 - u[1])), u[0], &cosine, &sine);
    z[i] = static_cast<T>(cosine);
    if (i + 1 < count) z[i + 1] = static_cast<T>(sine);
  }
}

template <typename T>
void fill(T* z, int64_t count, uint32_t seed) {
  Twister twister(seed);
  if (count < kBlock) return fill_pairs(twister, z, static_cast<int>(count));
  double u[kBlock];
  for (int64_t i = 0; i + kBlock <= count; i += kBlock) {
    twister.uniforms(u, kBlock);
    fill_block(u, z + i);
  }
  const int rest = static_cast<int>(count % kBlock);
  if (rest == 0) return;
  // of a last block that is not whole the numbers are lost, and the last kBlock elements are drawn anew
  twister.uniforms(u, rest);
  twister.uniforms(u, kBlock);
  fill_block(u, z + count - kBlock);
}

}  // namespace

extern const GaussianKernels kGaussianKernels = {fill<float>, fill<double>};

}  // namespace nasfast::cpu::NASFAST_ISA
