// Rows of sequences that lie one after another: pools, their gradients, and where each row belongs.
//
// `starts` has one entry more than there are sequences: sequence s has the rows starts[s] to starts[s + 1] - 1.
#pragma once

#include <cstdint>

namespace penstock::ops {

enum class Pool : std::uint8_t { kSum, kAverage, kSqrt, kMax, kFirst, kLast };

// A matrix of `width` columns whose rows are those of the sequences.
template <typename T>
struct SequenceRows {
  const T* values;
  const int64_t* starts;
  int64_t width;
};

// out[s] for s in [first, last): a sequence without rows becomes `pad`.  `index`: of kMax, the row that each maximum is
// from, -1 without rows; else it is not used.  Sums are in the order of the rows.
void pool_sequences(const SequenceRows<float>& rows, Pool kind, float pad, float* out, int64_t* index, int64_t first,
                    int64_t last);
void pool_sequences(const SequenceRows<double>& rows, Pool kind, double pad, double* out, int64_t* index, int64_t first,
                    int64_t last);

// The gradient of the rows of sequences [first, last); `grads.values` has a row for each sequence.
void pool_gradients(const SequenceRows<float>& grads, Pool kind, const int64_t* index, float* out, int64_t first,
                    int64_t last);
void pool_gradients(const SequenceRows<double>& grads, Pool kind, const int64_t* index, double* out, int64_t first,
                    int64_t last);

}  // namespace penstock::ops
