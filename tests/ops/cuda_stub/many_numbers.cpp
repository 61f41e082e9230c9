// The moments of a channel from three rows of 2^24 - 1 numbers each, by csrc/gpu/statistics.h: prints mean and m2.

#include <cstdio>

#include "../../../csrc/gpu/statistics.h"

int main() {
  using namespace nasfast::gpu;
  const float count = 16777215;
  const float numbers[] = {count, count, count};
  const Vec2 rows[] = {{as_bits(0), as_bits(0)}, {as_bits(1), as_bits(0)}, {as_bits(2), as_bits(0)}};
  const RowTotal total = add_rows<true>(rows, 1, {0, 3, 0, 1}, numbers).total<true>();
  std::printf("%.17g %.17g\n", total.first, total.second);
}
