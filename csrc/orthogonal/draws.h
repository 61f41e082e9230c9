// What torch.randn draws in float64 on a CPU, by a block of threads for each tensor: they make the words of a turn of
// the twister, and the numbers of two turns, at once. Teams and phases: householder.h.
#pragma once

#include <cmath>

#include "gaussian.h"

namespace nasfast::orthogonal {

// One tensor to fill.
template <typename T>
struct Draw {
  T* z;
  int64_t count;
  uint32_t seed;
};

// In shared memory.
struct DrawMemory {
  uint32_t words[2][kWords];  // of the last two turns
  double last[kBlock];        // the uniform numbers of the last kBlock elements
};

// Makes the words of the next turn from those of this one. A word needs one of its own turn, kWords - kShift before it.
template <typename Team>
NASFAST_DEVICE void turn(const Team& team, const uint32_t* words, uint32_t* next) {
  constexpr int kStep = kWords - kShift;
  for (int begin = 0; begin < kWords; begin += kStep) {
    team.each([&](int thread) {
      static_assert(Team::kThreads >= kStep, "a word for each thread");
      const int i = begin + thread;
      if (thread >= kStep || i >= kWords) return;
      next[i] =
          twisted(words[i], i + 1 < kWords ? words[i + 1] : next[0], begin == 0 ? words[i + kShift] : next[i - kStep]);
    });
  }
}

template <typename T, typename Team>
NASFAST_DEVICE void run(const Team& team, const Draw<T>& draw, DrawMemory& memory) {
  constexpr int kHalf = kBlock / 2;
  const int rest = static_cast<int>(draw.count % kBlock);
  const int64_t whole = draw.count - rest;
  // fewer numbers than a block are drawn pair by pair, the angle first; of a last block that is not whole the numbers
  // are lost, and the last kBlock elements are drawn anew
  const int64_t first_of_last = whole == 0 ? 0 : whole + rest;
  const int64_t uniforms = rest == 0 ? whole : first_of_last + kBlock;
  team.each([&](int thread) {
    if (thread > 0) return;
    uint32_t word = memory.words[0][0] = draw.seed;
    for (int i = 0; i + 1 < kWords; ++i) memory.words[0][i + 1] = word = seeded_word(word, i);
  });
  // uniform number i of two turns
  const auto number = [&](int i) {
    const uint32_t* const words = memory.words[i < kUniforms ? 1 : 0] + 2 * (i % kUniforms);
    return uniform(tempered(words[0]), tempered(words[1]));
  };
  for (int64_t begin = 0; begin < uniforms; begin += 2 * kUniforms) {
    turn(team, memory.words[0], memory.words[1]);
    turn(team, memory.words[1], memory.words[0]);
    team.each([&](int thread) {
      for (int pair = thread; pair < kUniforms; pair += Team::kThreads) {
        const int i = pair / kHalf * kBlock + pair % kHalf;
        if (begin + i / kBlock * kBlock >= whole) break;
        double cosine, sine;
        on_circle(std::sqrt(-2 * logarithm(1 - number(i))), number(i + kHalf), &cosine, &sine);
        draw.z[begin + i] = static_cast<T>(cosine);
        draw.z[begin + i + kHalf] = static_cast<T>(sine);
      }
      const int64_t i = first_of_last + thread - begin;
      if (rest > 0 && thread < kBlock && i >= 0 && i < 2 * kUniforms) memory.last[thread] = number(static_cast<int>(i));
    });
  }
  team.each([&](int thread) {
    if (rest == 0 || thread >= kHalf) return;
    const int radius = whole == 0 ? 2 * thread + 1 : thread, angle = whole == 0 ? 2 * thread : thread + kHalf;
    double cosine, sine;
    on_circle(std::sqrt(-2 * logarithm(1 - memory.last[radius])), memory.last[angle], &cosine, &sine);
    T* const z = draw.z + (whole == 0 ? 0 : draw.count - kBlock);
    const int at_cosine = whole == 0 ? 2 * thread : thread, at_sine = whole == 0 ? at_cosine + 1 : thread + kHalf;
    if (whole > 0 || at_cosine < rest) z[at_cosine] = static_cast<T>(cosine);
    if (whole > 0 || at_sine < rest) z[at_sine] = static_cast<T>(sine);
  });
}

}  // namespace nasfast::orthogonal
