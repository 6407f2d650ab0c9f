// A copy of a few bytes. Rows are short (40 bytes in a CTR table), and a call of memcpy with a length unknown to the
// compiler costs more than the copy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace penstock::ops {

// Whole chunks, then one chunk that overlaps the one before.  `bytes` is at least the chunk.
template <typename Chunk>
inline void copy_overlapping(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kChunk = sizeof(Chunk);
  for (int64_t at = 0; at + kChunk <= bytes; at += kChunk) {
    std::memcpy(to + at, from + at, kChunk);
  }
  std::memcpy(to + bytes - kChunk, from + bytes - kChunk, kChunk);
}

struct Sixteen {
  char bytes[16];
};

inline void copy_row(char* to, const char* from, int64_t bytes) {
  if (bytes > 256) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  } else if (bytes >= 16) {
    copy_overlapping<Sixteen>(to, from, bytes);
  } else if (bytes >= 4) {
    copy_overlapping<int32_t>(to, from, bytes);
  } else {
    std::copy(from, from + bytes, to);
  }
}

}  // namespace penstock::ops
