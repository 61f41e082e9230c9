// The activations of the kernels, and functions that choose a template instance by storage type and activation.
#pragma once

#include "params.h"
#include "simd.h"

namespace nasfast::cpu::NASFAST_ISA {

// Activations in five classes, each made from an Act. Kernels are compiled for every class, so there are few.

struct Identity {
  explicit Identity(Act) {}
  VecF value(VecF z) const { return z; }
  VecF backward(VecF grad, VecF) const { return grad; }
};

// relu and relu6
struct Clamp {
  VecF most;  // NaN for relu: no number is above it, and `minimum` returns its second argument beside it

  explicit Clamp(Act act) : most(broadcast(act == Act::kRelu6 ? 6.0f : __builtin_nanf(""))) {}
  VecF value(VecF z) const { return minimum(most, maximum(VecF{}, z)); }
  // as in PyTorch, the gradient of a NaN passes
  VecF backward(VecF grad, VecF z) const { return (z <= 0.0f) | (z >= most) ? VecF{} : grad; }
};

struct Hswish {
  explicit Hswish(Act) {}
  VecF value(VecF z) const { return z * minimum(broadcast(1.0f), maximum(VecF{}, z * (1.0f / 6) + 0.5f)); }
  VecF backward(VecF grad, VecF z) const {
    const VecF inside = z > -3.0f ? grad * (z * (1.0f / 3) + 0.5f) : VecF{};
    return z < 3.0f ? inside : grad;
  }
};

// Not one class with tanh: beside its call, a loop keeps nothing in registers.
struct Silu {
  explicit Silu(Act) {}
  VecF value(VecF z) const { return z * sigmoid(z); }
  VecF backward(VecF grad, VecF z) const {
    const VecF s = sigmoid(z);
    return grad * (s * (1.0f + z * (1.0f - s)));
  }
};

struct Tanh {
  explicit Tanh(Act) {}
  VecF value(VecF z) const { return tanh(z); }
  VecF backward(VecF grad, VecF z) const {
    const VecF t = tanh(z);
    return grad * (1.0f - t * t);
  }
};

// Returns pick(A) for the class of the given activation.
template <typename Pick>
[[gnu::always_inline]] inline auto by_act(Act act, const Pick& pick) -> decltype(pick(Identity(act))) {
  switch (act) {
    case Act::kIdentity:
      return pick(Identity(act));
    case Act::kRelu:
    case Act::kRelu6:
      return pick(Clamp(act));
    case Act::kHswish:
      return pick(Hswish(act));
    case Act::kSilu:
      return pick(Silu(act));
    default:
      return pick(Tanh(act));
  }
}

// Returns pick(T{}, A) for the given storage type and the class of the activation.
template <typename Pick>
auto by_type(bool bfloat16, Act act, const Pick& pick) -> decltype(pick(float{}, Identity(act))) {
  if (bfloat16) return by_act(act, [&](auto a) { return pick(BFloat16{}, a); });
  return by_act(act, [&](auto a) { return pick(float{}, a); });
}

}  // namespace nasfast::cpu::NASFAST_ISA
