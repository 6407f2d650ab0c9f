// Optimizer updates of one row.  Arithmetic and order are those of the dense and sparse operators of src/ops, so that a
// table trains like a parameter.  row: [width values | states of width each]; gradient: width values.
//
// `Length` is the width, as a number or known to the compiler (table/length.h).
#pragma once

#include <cmath>
#include <cstdint>

namespace penstock::table {

template <typename Length>
struct Sgd {  // p -= lr g
  Length width;
  float lr;
  void operator()(float* __restrict row, const float* __restrict gradient) const {
    for (uint32_t k = 0; k < width; ++k) row[k] -= lr * gradient[k];
  }
};

template <typename Length>
struct Add {  // p += g: what GEO's servers do with deltas
  Length width;
  void operator()(float* __restrict row, const float* __restrict gradient) const {
    for (uint32_t k = 0; k < width; ++k) row[k] += gradient[k];
  }
};

template <typename Length>
struct Adagrad {  // s += g g; p -= lr g / (sqrt(s) + epsilon)
  Length width;
  float lr, epsilon;
  void operator()(float* __restrict row, const float* __restrict gradient) const {
    float* __restrict sum = row + width;
    for (uint32_t k = 0; k < width; ++k) {
      sum[k] += gradient[k] * gradient[k];
      row[k] -= lr * gradient[k] / (std::sqrt(sum[k]) + epsilon);
    }
  }
};

template <typename Length>
struct Adam {  // m = b1 m + (1 - b1) g; s = b2 s + (1 - b2) g g; p -= rate m / (sqrt(s) + epsilon)
  Length width;
  float rate, beta1, beta2, epsilon;  // rate: lr sqrt(1 - b2^t) / (1 - b1^t)
  void operator()(float* __restrict row, const float* __restrict gradient) const {
    float* __restrict first = row + width;
    float* __restrict second = first + width;
    for (uint32_t k = 0; k < width; ++k) {
      first[k] += (gradient[k] - first[k]) * (1 - beta1);
      second[k] += (gradient[k] * gradient[k] - second[k]) * (1 - beta2);
      row[k] -= rate * first[k] / (std::sqrt(second[k]) + epsilon);
    }
  }
};

}  // namespace penstock::table
