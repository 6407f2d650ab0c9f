#include "ops/fused.h"

#include "ops/target.h"

namespace penstock::ops {
namespace {

PENSTOCK_BODY void add_relu_body(T* __restrict to, const T* x, const T* y, int64_t width, bool y_is_row, int64_t begin,
                                 int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* out = to + row * width;
    const T* left = x + row * width;
    const T* right = y_is_row ? y : y + row * width;
    PENSTOCK_INDEPENDENT
    for (int64_t j = 0; j < width; ++j) {
      const T sum = left[j] + right[j];
      out[j] = sum < T(0) ? T(0) : sum;
    }
  }
}

}  // namespace

PENSTOCK_CLONES void add_relu(float* to, const float* x, const float* y, int64_t width, bool y_is_row, int64_t begin,
                              int64_t end) {
  add_relu_body<float>(to, x, y, width, y_is_row, begin, end);
}
PENSTOCK_CLONES void add_relu(double* to, const double* x, const double* y, int64_t width, bool y_is_row, int64_t begin,
                              int64_t end) {
  add_relu_body<double>(to, x, y, width, y_is_row, begin, end);
}

}  // namespace penstock::ops
