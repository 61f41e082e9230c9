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
