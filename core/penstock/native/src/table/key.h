// Keys: ids after a bijection that scatters them, so that equal keys are equal ids and a key is its own hash.
#pragma once

#include <cstdint>

namespace penstock::table {

constexpr uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

constexpr uint64_t unmix(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3ULL;  // the inverses of the two factors, modulo 2^64
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089ULL;
  return (x ^ (x >> 30) ^ (x >> 60)) - 0x9E3779B97F4A7C15ULL;
}

static_assert(unmix(mix(0)) == 0 && unmix(mix(~uint64_t{0})) == ~uint64_t{0});
static_assert(unmix(mix(0x0123456789ABCDEFULL)) == 0x0123456789ABCDEFULL && unmix(mix(77)) == 77);

}  // namespace penstock::table
