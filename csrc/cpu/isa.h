// The instruction set the CPU kernels run with.
#pragma once

#include <string>
#include <vector>

namespace nasfast::cpu {

// in ascending order: a processor that runs one of them runs those before it
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

// Names of the levels this build contains, ascending; `baseline` is always there.
std::vector<std::string> compiled_isas();

// Names of the compiled levels this processor runs, ascending.
std::vector<std::string> usable_isas();

// The level in use: the highest usable one, or the one NASFAST_ISA names. Decided at the first call and kept.
// Throws std::runtime_error when NASFAST_ISA names no usable level.
Isa current_isa();

std::string isa_name(Isa isa);

}  // namespace nasfast::cpu
