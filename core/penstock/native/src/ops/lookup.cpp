#include "ops/lookup.h"

#include <algorithm>
#include <cstring>

#include "ops/copy_row.h"
#include "ops/target.h"

namespace penstock::ops {
namespace {

constexpr int64_t kBlock = 1024;  // ids tested at a time: the loop has no exit inside, so it vectorises
constexpr int64_t kAhead = 16;    // rows whose lines are asked for before they are copied
constexpr int64_t kLine = 64;
constexpr int64_t kMaxLines = 4;  // beyond this the hardware's own prefetcher has understood

inline void prefetch_row(const char* row, int64_t bytes) {
  const int64_t reach = std::min(bytes, kMaxLines * kLine);
  for (int64_t at = 0; at < reach; at += kLine) {
    __builtin_prefetch(row + at);
  }
  __builtin_prefetch(row + bytes - 1);  // a row rarely starts at a line
}

// Columns of them from `first` on, of the rows of ids[begin, end), summed in registers.
template <typename T, int64_t Columns>
inline __attribute__((always_inline)) void sum_columns(const RowSums<T>& of, int64_t begin, int64_t end, int64_t first,
                                                       int64_t ahead, T* __restrict out) {
  T sum[Columns] = {};
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < ahead) {
      prefetch_row(reinterpret_cast<const char*>(of.table + of.ids[i + kAhead] * of.width),
                   of.width * static_cast<int64_t>(sizeof(T)));
    }
    if (of.ids[i] == of.padding_id) {
      continue;
    }
    const T* __restrict row = of.table + of.ids[i] * of.width + first;
    for (int64_t j = 0; j < Columns; ++j) {
      sum[j] += row[j];
    }
  }
  for (int64_t j = 0; j < Columns; ++j) {
    out[first + j] = sum[j];
  }
}

// All columns of a sequence, as many at a time as fit; rows are asked for ahead with the first ones.
PENSTOCK_BODY void sum_sequence(const RowSums<T>& of, int64_t begin, int64_t end, int64_t ahead, T* out) {
  int64_t at = 0;
  for (; at + 16 <= of.width; at += 16, ahead = 0) {
    sum_columns<T, 16>(of, begin, end, at, ahead, out);
  }
  for (; at + 4 <= of.width; at += 4, ahead = 0) {
    sum_columns<T, 4>(of, begin, end, at, ahead, out);
  }
  for (; at < of.width; ++at, ahead = 0) {
    sum_columns<T, 1>(of, begin, end, at, ahead, out);
  }
}

PENSTOCK_BODY void sum_sequences(const RowSums<T>& of, T* out, int64_t first, int64_t last) {
  const int64_t ahead = of.starts[last];
  for (int64_t s = first; s < last; ++s) {
    T* to = out + s * of.width;
    if (of.starts[s] == of.starts[s + 1]) {
      std::fill(to, to + of.width, of.pad);
    } else {
      sum_sequence<T>(of, of.starts[s], of.starts[s + 1], ahead, to);
    }
  }
}

}  // namespace

PENSTOCK_CLONES void sum_rows(const RowSums<float>& of, float* out, int64_t first, int64_t last) {
  sum_sequences<float>(of, out, first, last);
}
PENSTOCK_CLONES void sum_rows(const RowSums<double>& of, double* out, int64_t first, int64_t last) {
  sum_sequences<double>(of, out, first, last);
}

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
    char* to = out + i * gather.out_stride;
    if (ids[i] == gather.padding_id) {
      std::memset(to, 0, static_cast<size_t>(bytes));
    } else {
      copy_row(to, gather.table + ids[i] * bytes, bytes);
    }
  }
}

}  // namespace penstock::ops
