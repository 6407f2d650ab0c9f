// Optimizer updates of one row.  Arithmetic and order are those of the dense and sparse operators of src/ops, so that a
// table trains like a parameter.  `row` and `gradient` are width values, `states` as many for each state.
//
// `Length` is the width, as a number or known to the compiler (table/length.h).
#pragma once

#include <cmath>
#include <cstdint>

namespace penstock::table {

template <typename Length>
struct Sgd {  // p -= lr g
  static constexpr bool kHasStates = false;
  Length width;
  float lr;
  void operator()(float* __restrict row, float* /*states*/, const float* __restrict gradient) const {
    for (uint32_t k = 0; k < width; ++k) row[k] -= lr * gradient[k];
  }
};

template <typename Length>
struct Add {  // p += g: what GEO's servers do with deltas
  static constexpr bool kHasStates = false;
  Length width;
  void operator()(float* __restrict row, float* /*states*/, const float* __restrict gradient) const {
    for (uint32_t k = 0; k < width; ++k) row[k] += gradient[k];
  }
};

template <typename Length>
struct Adagrad {  // s += g g; p -= lr g / (sqrt(s) + epsilon)
  static constexpr bool kHasStates = true;
  Length width;
  float lr, epsilon;
  void operator()(float* __restrict row, float* __restrict states, const float* __restrict gradient) const {
    for (uint32_t k = 0; k < width; ++k) {
      states[k] += gradient[k] * gradient[k];
      row[k] -= lr * gradient[k] / (std::sqrt(states[k]) + epsilon);
    }
  }
};

template <typename Length>
struct Adam {  // m = b1 m + (1 - b1) g; s = b2 s + (1 - b2) g g; p -= rate m / (sqrt(s) + epsilon)
  static constexpr bool kHasStates = true;
  Length width;
  float rate, beta1, beta2, epsilon;  // rate: lr sqrt(1 - b2^t) / (1 - b1^t)
  void operator()(float* __restrict row, float* __restrict states, const float* __restrict gradient) const {
    float* __restrict first = states;
    float* __restrict second = states + width;
    for (uint32_t k = 0; k < width; ++k) {
      first[k] += (gradient[k] - first[k]) * (1 - beta1);
      second[k] += (gradient[k] * gradient[k] - second[k]) * (1 - beta2);
      row[k] -= rate * first[k] / (std::sqrt(second[k]) + epsilon);
    }
  }
};

}  // namespace penstock::table
