#include "ops/sequences.h"

#include <algorithm>
#include <cmath>

#include "ops/target.h"

namespace penstock::ops {
namespace {

PENSTOCK_BODY void add_rows(const T* __restrict from, int64_t count, int64_t width, T* __restrict sum) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t j = 0; j < width; ++j) {
      sum[j] += from[row * width + j];
    }
  }
}

PENSTOCK_BODY void scale(T* __restrict values, int64_t width, T factor) {
  for (int64_t j = 0; j < width; ++j) {
    values[j] *= factor;
  }
}

// What a sum over `count` rows is multiplied by.
PENSTOCK_BODY T factor_of(Pool kind, int64_t count) {
  const T rows = static_cast<T>(count);
  return kind == Pool::kAverage ? T{1} / rows : kind == Pool::kSqrt ? T{1} / std::sqrt(rows) : T{1};
}

PENSTOCK_BODY void largest(const T* __restrict from, int64_t begin, int64_t end, int64_t width, T* __restrict out,
                           int64_t* __restrict index) {
  std::copy(from + begin * width, from + (begin + 1) * width, out);
  std::fill(index, index + width, begin);
  for (int64_t row = begin + 1; row < end; ++row) {
    for (int64_t j = 0; j < width; ++j) {
      const T value = from[row * width + j];
      if (value > out[j] || (std::isnan(value) && !std::isnan(out[j]))) {
        out[j] = value;
        index[j] = row;
      }
    }
  }
}

PENSTOCK_BODY void pool_one(const SequenceRows<T>& rows, Pool kind, int64_t begin, int64_t end, T* out,
                            int64_t* index) {
  const int64_t width = rows.width;
  switch (kind) {
    case Pool::kMax:
      largest<T>(rows.values, begin, end, width, out, index);
      return;
    case Pool::kFirst:
      std::copy(rows.values + begin * width, rows.values + (begin + 1) * width, out);
      return;
    case Pool::kLast:
      std::copy(rows.values + (end - 1) * width, rows.values + end * width, out);
      return;
    default:
      std::fill(out, out + width, T{0});
      add_rows<T>(rows.values + begin * width, end - begin, width, out);
      if (kind != Pool::kSum) {
        scale<T>(out, width, factor_of<T>(kind, end - begin));
      }
  }
}

PENSTOCK_BODY void pool_all(const SequenceRows<T>& rows, Pool kind, T pad, T* out, int64_t* index, int64_t first,
                            int64_t last) {
  for (int64_t s = first; s < last; ++s) {
    T* to = out + s * rows.width;
    int64_t* from = kind == Pool::kMax ? index + s * rows.width : nullptr;
    if (rows.starts[s] < rows.starts[s + 1]) {
      pool_one<T>(rows, kind, rows.starts[s], rows.starts[s + 1], to, from);
      continue;
    }
    std::fill(to, to + rows.width, pad);
    if (from != nullptr) {
      std::fill(from, from + rows.width, int64_t{-1});
    }
  }
}

PENSTOCK_BODY void gradients_of_one(const T* __restrict grad, Pool kind, const int64_t* index, int64_t begin,
                                    int64_t end, int64_t width, T* __restrict out) {
  if (kind == Pool::kSum || kind == Pool::kAverage || kind == Pool::kSqrt) {
    const T factor = factor_of<T>(kind, end - begin);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t j = 0; j < width; ++j) {
        out[row * width + j] = grad[j] * factor;
      }
    }
    return;
  }
  std::fill(out + begin * width, out + end * width, T{0});
  for (int64_t j = 0; j < width; ++j) {
    const int64_t row = kind == Pool::kMax ? index[j] : kind == Pool::kFirst ? begin : end - 1;
    out[row * width + j] = grad[j];
  }
}

PENSTOCK_BODY void gradients_of_all(const SequenceRows<T>& grads, Pool kind, const int64_t* index, T* out,
                                    int64_t first, int64_t last) {
  const int64_t width = grads.width;
  for (int64_t s = first; s < last; ++s) {
    if (grads.starts[s] < grads.starts[s + 1]) {
      const int64_t* from = kind == Pool::kMax ? index + s * width : nullptr;
      gradients_of_one<T>(grads.values + s * width, kind, from, grads.starts[s], grads.starts[s + 1], width, out);
    }
  }
}

}  // namespace

PENSTOCK_CLONES void pool_sequences(const SequenceRows<float>& rows, Pool kind, float pad, float* out, int64_t* index,
                                    int64_t first, int64_t last) {
  pool_all<float>(rows, kind, pad, out, index, first, last);
}
PENSTOCK_CLONES void pool_sequences(const SequenceRows<double>& rows, Pool kind, double pad, double* out,
                                    int64_t* index, int64_t first, int64_t last) {
  pool_all<double>(rows, kind, pad, out, index, first, last);
}

PENSTOCK_CLONES void pool_gradients(const SequenceRows<float>& grads, Pool kind, const int64_t* index, float* out,
                                    int64_t first, int64_t last) {
  gradients_of_all<float>(grads, kind, index, out, first, last);
}
PENSTOCK_CLONES void pool_gradients(const SequenceRows<double>& grads, Pool kind, const int64_t* index, double* out,
                                    int64_t first, int64_t last) {
  gradients_of_all<double>(grads, kind, index, out, first, last);
}

}  // namespace penstock::ops
