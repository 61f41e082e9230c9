// The largest matrices that a thread of a GPU or a lane of a vector does alone: 7 x 7 filters, and everything up to 8 x
// 8.
#pragma once

namespace nasfast::orthogonal {

constexpr int kTinyElements = 64;
constexpr int kTinyColumns = 8;  // of the tall form
static_assert(kTinyElements < (kTinyColumns + 1) * (kTinyColumns + 1), "a tiny matrix may have more columns");

}  // namespace nasfast::orthogonal
