// The activations of the kernels, and functions that choose a template instance by storage type and activation.
#pragma once

#include "params.h"
#include "simd.h"

namespace nasfast::cpu::NASFAST_ISA {

struct Identity {
  static VecF value(VecF z) { return z; }
  static VecF backward(VecF grad, VecF) { return grad; }
};

struct Relu {
  static VecF value(VecF z) { return maximum(VecF{}, z); }
  static VecF backward(VecF grad, VecF z) { return z > 0.0f ? grad : VecF{}; }
};

struct Relu6 {
  static VecF value(VecF z) { return minimum(broadcast(6.0f), maximum(VecF{}, z)); }
  static VecF backward(VecF grad, VecF z) { return (z > 0.0f) & (z < 6.0f) ? grad : VecF{}; }
};

struct Tanh {
  static VecF value(VecF z) { return tanh(z); }
  static VecF backward(VecF grad, VecF z) {
    const VecF y = tanh(z);
    return grad * (1.0f - y * y);
  }
};

struct Hswish {
  static VecF value(VecF z) { return z * minimum(broadcast(1.0f), maximum(VecF{}, z * (1.0f / 6) + 0.5f)); }
  static VecF backward(VecF grad, VecF z) {
    const VecF inside = z > -3.0f ? grad * (z * (1.0f / 3) + 0.5f) : VecF{};
    return z < 3.0f ? inside : grad;
  }
};

struct Silu {
  // 1 / (1 + exp(-z)), with an absolute error below 3e-7
  static VecF sigmoid(VecF z) { return 0.5f + 0.5f * tanh(0.5f * z); }
  static VecF value(VecF z) { return z * sigmoid(z); }
  static VecF backward(VecF grad, VecF z) {
    const VecF s = sigmoid(z);
    return grad * (s * (1.0f + z * (1.0f - s)));
  }
};

// Returns pick(A{}) for the given activation.
template <typename Pick>
auto by_act(Act act, const Pick& pick) -> decltype(pick(Identity{})) {
  switch (act) {
    case Act::kRelu:
      return pick(Relu{});
    case Act::kRelu6:
      return pick(Relu6{});
    case Act::kTanh:
      return pick(Tanh{});
    case Act::kHswish:
      return pick(Hswish{});
    case Act::kSilu:
      return pick(Silu{});
    default:
      return pick(Identity{});
  }
}

// Returns pick(T{}, A{}) for the given storage type and activation.
template <typename Pick>
auto by_type(bool bfloat16, Act act, const Pick& pick) -> decltype(pick(float{}, Identity{})) {
  if (bfloat16) return by_act(act, [&](auto a) { return pick(BFloat16{}, a); });
  return by_act(act, [&](auto a) { return pick(float{}, a); });
}

}  // namespace nasfast::cpu::NASFAST_ISA
