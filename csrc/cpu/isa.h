// The instruction set that the CPU kernels use.
#pragma once

#include <string>
#include <vector>

namespace nasfast::cpu {

// In ascending order: a processor that runs one of them also runs those before it.
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// Names of the levels that this build contains, in ascending order; `baseline` is always one of them.
std::vector<std::string> compiled_isas();

// Names of the compiled levels that this processor runs, in ascending order.
std::vector<std::string> usable_isas();

// The level in use: the one that NASFAST_ISA names, or else the highest usable one. The first call decides.
// Throws std::runtime_error when NASFAST_ISA names no usable level.
Isa current_isa();

std::string isa_name(Isa isa);

}  // namespace nasfast::cpu
