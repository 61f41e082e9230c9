// The activations of the kernels, and functions that choose a template instance by storage type and activation.
#pragma once

#include "params.h"
#include "simd.h"

namespace nasfast::cpu::NASFAST_ISA {

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

// Activations in three classes, each made from an Act. Kernels are compiled for every class, so there are few.

struct Identity {
  explicit Identity(Act) {}
  VecF value(VecF z) const { return z; }
  VecF backward(VecF grad, VecF) const { return grad; }
};

// relu and relu6
struct Clamp {
  VecF most;

  explicit Clamp(Act act) : most(broadcast(act == Act::kRelu6 ? 6.0f : __builtin_inff())) {}
  VecF value(VecF z) const { return minimum(most, maximum(VecF{}, z)); }
  VecF backward(VecF grad, VecF z) const { return (z > 0.0f) & (z < most) ? grad : VecF{}; }
};

// tanh, hswish and silu, told apart for every vector: their arithmetic takes longer than the branch
struct Curved {
  Act act;

  explicit Curved(Act act) : act(act) {}
  VecF value(VecF z) const {
    return act == Act::kTanh ? Tanh::value(z) : act == Act::kHswish ? Hswish::value(z) : Silu::value(z);
  }
  VecF backward(VecF grad, VecF z) const {
    if (act == Act::kTanh) return Tanh::backward(grad, z);
    return act == Act::kHswish ? Hswish::backward(grad, z) : Silu::backward(grad, z);
  }
};

// Returns pick(A) for the class of the given activation.
template <typename Pick>
auto by_act(Act act, const Pick& pick) -> decltype(pick(Identity(act))) {
  switch (act) {
    case Act::kIdentity:
      return pick(Identity(act));
    case Act::kRelu:
    case Act::kRelu6:
      return pick(Clamp(act));
    default:
      return pick(Curved(act));
  }
}

// Returns pick(T{}, A) for the given storage type and the class of the activation.
template <typename Pick>
auto by_type(bool bfloat16, Act act, const Pick& pick) -> decltype(pick(float{}, Identity(act))) {
  if (bfloat16) return by_act(act, [&](auto a) { return pick(BFloat16{}, a); });
  return by_act(act, [&](auto a) { return pick(float{}, a); });
}

}  // namespace nasfast::cpu::NASFAST_ISA
