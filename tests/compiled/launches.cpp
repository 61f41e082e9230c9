// Records what the CUDA kernels of conv_bn_act_chain would launch on a GPU, and launches nothing.
//
// The operators of csrc/library.cpp get a Meta kernel that goes through csrc/gpu/chain.h with a machine that only writes
// down its launches. kernels.py builds this file, loads it and reads the records.

#include <cxxabi.h>
#include <torch/csrc/stable/library.h>

#include <sstream>
#include <string>
#include <typeinfo>
#include <vector>

#include "../../csrc/gpu/chain.h"
#include "../../csrc/gpu/dense_forward.h"
#include "../../csrc/gpu/depthwise.h"
#include "../../csrc/gpu/depthwise_panels.h"
#include "../../csrc/gpu/norm.h"
#include "../../csrc/gpu/pointwise.h"

namespace nasfast::gpu {
namespace {

std::string name_of(const std::type_info& type) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  const std::string name = demangled;
  std::free(demangled);
  return name;
}

// Every kernel that some call could launch, as lines of JSON.
std::string& kernels() {
  static std::string lines;
  return lines;
}

template <class Kernel>
struct Known {
  static const bool known;
};
template <class Kernel>
const bool Known<Kernel>::known = [] {
  std::ostringstream line;
  line << "{\"name\": \"" << name_of(typeid(Kernel)) << "\", \"threads\": " << Kernel::kThreads
       << ", \"blocks\": " << Kernel::kBlocks << "}\n";
  kernels() += line.str();
  return true;
}();

std::string records, taken;

struct Recorder {
  static constexpr bool panels = true;
  int multiprocessors = 0;
  size_t shared_memory = 0;

  template <class Kernel>
  void launch(int count_x, int count_y, size_t shared, const typename Kernel::Args&) const {
    if (!Known<Kernel>::known) return;
    std::ostringstream line;
    line << "{\"name\": \"" << name_of(typeid(Kernel)) << "\", \"grid\": [" << count_x << ", " << count_y
         << "], \"shared\": " << shared;
    records += line.str();
  }
  void launched(const char* stage, const Geometry&) const {
    records += std::string(", \"stage\": \"") + stage + "\"}\n";
  }
};

Recorder recorder;

const Recorder& recorder_of(const Tensor&) { return recorder; }

using Operators = ChainOperators<recorder_of>;

}  // namespace
}  // namespace nasfast::gpu

#define EXPORTED __attribute__((visibility("default")))
extern "C" {
// shared_memory: bytes that a block can have.
EXPORTED void record_for(int multiprocessors, int shared_memory) {
  nasfast::gpu::recorder = {multiprocessors, static_cast<size_t>(shared_memory) - nasfast::gpu::kReserved};
}
EXPORTED const char* known_kernels() { return nasfast::gpu::kernels().c_str(); }
// The launches since the last call, as lines of JSON.
EXPORTED const char* take_records() {
  nasfast::gpu::taken = std::move(nasfast::gpu::records);
  nasfast::gpu::records.clear();
  return nasfast::gpu::taken.c_str();
}
}

STABLE_TORCH_LIBRARY_IMPL(nasfast, Meta, m) {
  m.impl("conv_bn_act_chain_gpu_counters", TORCH_BOX(&nasfast::gpu::Operators::counters));
  m.impl("conv_bn_act_chain_gpu_fwd", TORCH_BOX(&nasfast::gpu::Operators::forward));
  m.impl("conv_bn_act_chain_gpu_apply", TORCH_BOX(&nasfast::gpu::Operators::apply));
  m.impl("conv_bn_act_chain_gpu_reduce", TORCH_BOX(&nasfast::gpu::Operators::reduce));
  m.impl("conv_bn_act_chain_gpu_bwd", TORCH_BOX(&nasfast::gpu::Operators::backward));
}
