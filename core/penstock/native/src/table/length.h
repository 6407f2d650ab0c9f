// How many floats a row has, known to the compiler where the number is a usual one: copies and updates then have no
// loop to set up, which is half of their time for a row of one cache line.
#pragma once

#include <cstdint>

namespace penstock::table {

template <uint32_t kFloats>
struct Fixed {
  constexpr operator uint32_t() const { return kFloats; }  // NOLINT: it stands for the number
};

struct AnyLength {
  uint32_t floats;
  operator uint32_t() const { return floats; }  // NOLINT: it stands for the number
};

// call(length) with a Fixed or an AnyLength of `floats`.
template <typename Call>
void with_length(uint32_t floats, Call call) {
  switch (floats) {
    case 4:
      return call(Fixed<4>{});
    case 8:
      return call(Fixed<8>{});
    case 16:
      return call(Fixed<16>{});
    case 32:
      return call(Fixed<32>{});
    case 64:
      return call(Fixed<64>{});
    default:
      return call(AnyLength{floats});
  }
}

}  // namespace penstock::table
