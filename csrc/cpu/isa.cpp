#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nasfast::cpu {
namespace {

// The levels of this build, in ascending order.
constexpr Isa kCompiled[] = {
    Isa::kBaseline,
#ifdef NASFAST_HAS_AVX2
    Isa::kAvx2,
#endif
#ifdef NASFAST_HAS_AVX512
    Isa::kAvx512,
#endif
#ifdef NASFAST_HAS_AVX512BF16
    Isa::kAvx512Bf16,
#endif
#ifdef NASFAST_HAS_AMX
    Isa::kAmx,
#endif
};

#ifdef __x86_64__
// Whether the tile registers of AMX and their bf16 product are here. Linux refuses them to a process that has not asked
// for them, because they add 8 KiB to the state of a thread.
bool has_tiles() {
  constexpr unsigned kFeatures = 1u << 24 | 1u << 22;          // AMX-TILE and AMX-BF16, in edx of leaf 7
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kFeatures) != kFeatures) return false;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif

bool runs_here(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return true;
#ifdef __x86_64__
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case Isa::kAvx512Bf16:
      return runs_here(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16");
    case Isa::kAmx:
      return runs_here(Isa::kAvx512Bf16) && has_tiles();
#endif
    default:
      return false;
  }
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

Isa choose() {
  const char* setting = std::getenv("NASFAST_ISA");
  const std::string name = setting == nullptr ? "" : setting;
  Isa best = Isa::kBaseline;
  for (Isa isa : kCompiled) {
    if (!runs_here(isa)) continue;
    if (isa_name(isa) == name) return isa;
    best = isa;
  }
  if (!name.empty()) {
    throw std::runtime_error("NASFAST_ISA: '" + name + "' is not usable here; valid values are " + join(usable_isas()));
  }
  return best;
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (Isa isa : kCompiled) names.push_back(isa_name(isa));
  return names;
}

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (Isa isa : kCompiled) {
    if (runs_here(isa)) names.push_back(isa_name(isa));
  }
  return names;
}

Isa current_isa() {
  static const Isa isa = choose();
  return isa;
}

std::string isa_name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
    case Isa::kAmx:
      return "amx";
  }
  throw std::logic_error("isa_name: not a level");
}

}  // namespace nasfast::cpu
