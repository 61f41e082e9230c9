// What torch.randn draws in float64 on a CPU, by a block of threads for each tensor: they make the words of a turn of
// the twister, then the elements whose numbers are complete with it. Teams: householder.h.
#pragma once

#include <cmath>

#include "gaussian.h"

namespace nasfast::orthogonal {

// A tensor to fill, of float64 or float32.
struct Draw {
  void* z;
  bool in_double;
  int64_t count;
  uint32_t seed;

  NASFAST_DEVICE void put(int64_t i, double x) const {
    if (in_double) {
      static_cast<double*>(z)[i] = x;
    } else {
      static_cast<float*>(z)[i] = static_cast<float>(x);
    }
  }
};

using DrawMemory = uint32_t[2][kWords];  // in shared memory: the words of two turns

template <typename Team>
NASFAST_DEVICE void run(const Team& team, const Draw& draw, DrawMemory& memory) {
  constexpr int kHalf = kBlock / 2, kStep = kWords - kShift;
  static_assert(Team::kThreads >= kStep, "a word for each thread");
  // Fewer numbers than a block are drawn pair by pair, the angle first. Of a last block that is not whole the numbers
  // are lost, and the last kBlock elements are drawn anew.
  const bool pairs = draw.count < kBlock;
  const int64_t last = (draw.count + kBlock - 1) / kBlock - 1, before_last = draw.count - kBlock;
  const int64_t first_of_last = pairs ? 0 : draw.count % kBlock == 0 ? before_last : draw.count;  // uniform number
  team.each([&](int thread) {
    if (thread > 0) return;
    uint32_t word = memory[0][0] = draw.seed;
    for (int i = 0; i + 1 < kWords; ++i) memory[0][i + 1] = word = seeded_word(word, i);
  });
  int64_t done = 0;  // blocks
  for (int turn = 0; done <= last; ++turn) {
    const int64_t end = (turn + int64_t{1}) * kUniforms;
    const uint32_t* const words = memory[turn % 2];
    uint32_t* const next = memory[1 - turn % 2];
    for (int from = 0; from < kWords; from += kStep) {  // a word needs one of its own turn, kStep before it
      team.each([&](int thread) {
        const int i = from + thread;
        if (thread >= kStep || i >= kWords) return;
        const uint32_t far = from == 0 ? words[i + kShift] : next[i - kStep];
        next[i] = twisted(words[i], i + 1 < kWords ? words[i + 1] : next[0], far);
      });
    }
    const auto number = [&](int64_t i) {  // uniform number i, of this turn or the one before
      const int at = static_cast<int>(i - end) + kUniforms;
      const uint32_t* const pair = at < 0 ? words + kWords + 2 * at : next + 2 * at;
      return uniform(tempered(pair[0]), tempered(pair[1]));
    };
    const int64_t complete = end / kBlock < last ? end / kBlock : last + (first_of_last + kBlock <= end);
    team.each([&](int thread) {
      for (int64_t i = done * kHalf + thread; i < complete * kHalf; i += Team::kThreads) {
        const int64_t block = i / kHalf, k = i % kHalf, limit = block == last ? draw.count : before_last;
        const int64_t from = block < last ? block * kBlock : first_of_last;
        const int64_t to = block < last || pairs ? block * kBlock : before_last;
        const int64_t one = pairs ? 2 * k : k, other = pairs ? one + 1 : k + kHalf;
        const double radius = std::sqrt(-2 * logarithm(1 - number(from + (pairs ? other : one))));
        double cosine, sine;
        on_circle(radius, number(from + (pairs ? one : other)), &cosine, &sine);
        if (to + one < limit) draw.put(to + one, cosine);
        if (to + other < limit) draw.put(to + other, sine);
      }
    });
    done = complete;
  }
}

}  // namespace nasfast::orthogonal
