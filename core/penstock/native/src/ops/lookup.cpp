#include "ops/lookup.h"

#include <algorithm>
#include <cstring>

#include "ops/target.h"

namespace penstock::ops {
namespace {

constexpr int64_t kBlock = 1024;  // ids tested at a time: the loop has no exit inside, so it vectorises
constexpr int64_t kAhead = 16;    // rows whose lines are asked for before they are copied
constexpr int64_t kLine = 64;
constexpr int64_t kMaxLines = 4;  // beyond this the hardware's own prefetcher has understood

// Rows are short (40 bytes in a CTR table), and a call of memcpy with a length unknown to the compiler costs more
// than the copy.  Whole chunks, then one chunk that overlaps the one before.  `bytes` is at least the chunk.
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

inline void prefetch_row(const char* row, int64_t bytes) {
  const int64_t reach = std::min(bytes, kMaxLines * kLine);
  for (int64_t at = 0; at < reach; at += kLine) {
    __builtin_prefetch(row + at);
  }
  __builtin_prefetch(row + bytes - 1);  // a row rarely starts at a line
}

}  // namespace

PENSTOCK_CLONES int64_t first_outside(const int64_t* ids, int64_t count, int64_t height) {
  const uint64_t limit = static_cast<uint64_t>(height);
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t end = std::min(count, at + kBlock);
    uint64_t outside = 0;
    for (int64_t i = at; i < end; ++i) {
      outside |= static_cast<uint64_t>(ids[i]) >= limit ? 1U : 0U;
    }
    if (outside != 0) {
      return std::find_if(ids + at, ids + end, [&](int64_t id) { return static_cast<uint64_t>(id) >= limit; }) - ids;
    }
  }
  return -1;
}

void gather_rows(const RowGather& gather, const int64_t* ids, char* out, int64_t begin, int64_t end) {
  const int64_t bytes = gather.row_bytes;
  if (bytes == 0) {
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      prefetch_row(gather.table + ids[i + kAhead] * bytes, bytes);
    }
    char* to = out + i * bytes;
    if (ids[i] == gather.padding_id) {
      std::memset(to, 0, static_cast<size_t>(bytes));
    } else {
      copy_row(to, gather.table + ids[i] * bytes, bytes);
    }
  }
}

}  // namespace penstock::ops
