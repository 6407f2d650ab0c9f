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
};

// Copy the rows of ids[begin, end) to their places in `out`.  Ranges may run on different threads.
void gather_rows(const RowGather& gather, const int64_t* ids, char* out, int64_t begin, int64_t end);

}  // namespace penstock::ops
