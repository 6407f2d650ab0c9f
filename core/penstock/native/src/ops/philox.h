// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random words as a pure
// function of (key, counter).  Integers only: the same bits on every machine, in any order, on any thread.
#pragma once

#include <cstdint>

namespace penstock::ops {

// A stream of random words: two seeds make the key, `high` is the upper half of the 128-bit counter.
struct PhiloxStream {
  uint32_t key0;
  uint32_t key1;
  uint64_t high;
};

// The finaliser of SplitMix64: neighbouring seeds give unrelated keys.
inline uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

inline PhiloxStream philox_stream(int64_t seed, int64_t sub_seed, int64_t high) {
  const uint64_t key = mix64(mix64(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(sub_seed));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint64_t>(high)};
}

// Words of the kPhiloxLanes counters first, first + 1, ...: word w of counter first + lane is out[w][lane].
// Two vectors of lanes in flight hide the latency of the multiplications (measured: 16 lanes take 2.6 times as long).
inline constexpr int kPhiloxLanes = 32;

static inline __attribute__((always_inline)) void philox_block(const PhiloxStream& stream, uint64_t first,
                                                               uint32_t (&out)[4][kPhiloxLanes]) {
  uint32_t key0 = stream.key0;
  uint32_t key1 = stream.key1;
  for (int lane = 0; lane < kPhiloxLanes; ++lane) {
    const uint64_t low = first + static_cast<uint64_t>(lane);
    out[0][lane] = static_cast<uint32_t>(low);
    out[1][lane] = static_cast<uint32_t>(low >> 32);
    out[2][lane] = static_cast<uint32_t>(stream.high);
    out[3][lane] = static_cast<uint32_t>(stream.high >> 32);
  }
  for (int round = 0; round < 10; ++round) {
    for (int lane = 0; lane < kPhiloxLanes; ++lane) {
      const uint64_t product0 = uint64_t{0xD2511F53} * out[0][lane];
      const uint64_t product1 = uint64_t{0xCD9E8D57} * out[2][lane];
      out[0][lane] = static_cast<uint32_t>(product1 >> 32) ^ out[1][lane] ^ key0;
      out[1][lane] = static_cast<uint32_t>(product1);
      out[2][lane] = static_cast<uint32_t>(product0 >> 32) ^ out[3][lane] ^ key1;
      out[3][lane] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
}

}  // namespace penstock::ops
