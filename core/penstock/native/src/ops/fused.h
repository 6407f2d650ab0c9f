// Elementwise work done in one pass over memory: an activation on a sum.
//
// Invariant: the bits are those of torch's operators one after another, unless a function says otherwise.
#pragma once

#include <cstdint>

namespace penstock::ops {

// to[i] = max(x[i] + y[i % width], 0): NaN stays NaN. `begin` and `end` are rows of `width` elements.
void add_relu(float* to, const float* x, const float* y, int64_t width, bool y_is_row, int64_t begin, int64_t end);
void add_relu(double* to, const double* x, const double* y, int64_t width, bool y_is_row, int64_t begin, int64_t end);

}  // namespace penstock::ops
