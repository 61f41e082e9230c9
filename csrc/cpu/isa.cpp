#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace nasfast::cpu {
namespace {

bool is_compiled(Isa isa) {
#ifdef NASFAST_X86_ISAS
  (void)isa;
  return true;
#else
  return isa == Isa::kBaseline;
#endif
}

bool runs_here(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return true;
#ifdef NASFAST_X86_ISAS
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case Isa::kAvx512Bf16:
      return runs_here(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16");
#endif
    default:
      return false;
  }
}

constexpr Isa kAllIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

Isa choose() {
  const char* wanted = std::getenv("NASFAST_ISA");
  Isa best = Isa::kBaseline;
  for (Isa isa : kAllIsas) {
    if (!is_compiled(isa) || !runs_here(isa)) continue;
    if (wanted && *wanted && isa_name(isa) == wanted) return isa;
    best = isa;
  }
  if (wanted && *wanted) {
    throw std::runtime_error("NASFAST_ISA: '" + std::string(wanted) + "' is not usable here; valid values are " +
                             join(usable_isas()));
  }
  return best;
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (Isa isa : kAllIsas) {
    if (is_compiled(isa)) names.push_back(isa_name(isa));
  }
  return names;
}

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (Isa isa : kAllIsas) {
    if (is_compiled(isa) && runs_here(isa)) names.push_back(isa_name(isa));
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
  }
  throw std::logic_error("isa_name: not a level");
}

}  // namespace nasfast::cpu
