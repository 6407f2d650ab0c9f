// Largest values of windows of 2 x 2, and their gradient.
//
// Invariant: the bits are those of torch's max_pool2d, relu and their gradients one after another. Of equal values the
// first of a window is taken, of several NaN the last; -0.0 and 0.0 are equal. Relu leaves -0.0 as it is; on Arm
// torch's makes 0.0 of it where it computes by vectors, and leaves those of the last elements.
#pragma once

#include <cstdint>

namespace penstock::ops {

inline constexpr int64_t kWidestPool = 4096;  // elements of a row of x: what fits the scratch
inline constexpr uint8_t kNowhere = 4;        // the place of a window whose gradient is zero

// x: `pairs` pairs of rows of `width` elements, even. y and places: a row of width / 2 for each pair. places: which of
// the window's elements is y, row after row; with `relu`, x is relu of what is given, and kNowhere where y is 0.
void max_pool(const float* x, float* y, uint8_t* places, int64_t pairs, int64_t width, bool relu);
void max_pool(const double* x, double* y, uint8_t* places, int64_t pairs, int64_t width, bool relu);

// x: every element, from the gradient of y and the places of `max_pool`; sizes as there.
void max_pool_gradient(float* x, const float* y, const uint8_t* places, int64_t pairs, int64_t width);
void max_pool_gradient(double* x, const double* y, const uint8_t* places, int64_t pairs, int64_t width);

}  // namespace penstock::ops
