// Gather of table rows by id, for any element type: rows are bytes.
//
// Invariant: `gather_rows` is only called for ids that `first_outside` has accepted.
#pragma once

#include <cstdint>

namespace penstock::ops {

// Position of the first id outside [0, height), or -1 if there is none.
int64_t first_outside(const int64_t* ids, int64_t count, int64_t height);

struct RowGather {
  const char* table;
  int64_t row_bytes;
  int64_t padding_id;  // this id gives zeros; -1: none does
  int64_t out_stride;  // bytes from one row of the result to the next
};

// Copy the rows of ids[begin, end) to their places in `out`.  Ranges may run on different threads.
void gather_rows(const RowGather& gather, const int64_t* ids, char* out, int64_t begin, int64_t end);

// A table whose rows are summed, those of each sequence of ids.  `starts` as in sequences.h.
template <typename T>
struct RowSums {
  const T* table;
  const int64_t* ids;
  const int64_t* starts;
  int64_t width;
  int64_t padding_id;  // this id adds nothing; -1: none does
  T pad;               // of a sequence without ids
};

// out[s] for s in [first, last).  Sums are in the order of the ids.
void sum_rows(const RowSums<float>& of, float* out, int64_t first, int64_t last);
void sum_rows(const RowSums<double>& of, double* out, int64_t first, int64_t last);

}  // namespace penstock::ops
