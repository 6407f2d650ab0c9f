// Element-wise loops of the exchange between processes, over ranges of contiguous arrays. Torch-free.
//
// Sums are made in the order of the sources, without fused multiply-adds: the same bits in every process.
#pragma once

#include <cstdint>

namespace penstock::ring {

// out[i] = weight * (((sources[0][i] + sources[1][i]) + ...)). `count` is at least 1; a weight of 1 is not multiplied,
// and one of 0 gives zeros, whatever the sources hold. Integers take no other weights.
void weigh(float* out, const float* const* sources, int64_t count, double weight, int64_t n);
void weigh(double* out, const double* const* sources, int64_t count, double weight, int64_t n);
void weigh(int32_t* out, const int32_t* const* sources, int64_t count, double weight, int64_t n);
void weigh(int64_t* out, const int64_t* const* sources, int64_t count, double weight, int64_t n);

// out[i] = ((sources[0][i] + sources[1][i]) + ...); `out` may be one of the sources.
void sum(float* out, const float* const* sources, int64_t count, int64_t n);
void sum(double* out, const double* const* sources, int64_t count, int64_t n);
void sum(int32_t* out, const int32_t* const* sources, int64_t count, int64_t n);
void sum(int64_t* out, const int64_t* const* sources, int64_t count, int64_t n);

// out[i] = ((weights[0] * sources[0][i] + weights[1] * sources[1][i]) + ...), with the bits of weigh() and then sum().
// `out` may be one of the sources.
void weighted_sum(float* out, const float* const* sources, const double* weights, int64_t count, int64_t n);
void weighted_sum(double* out, const double* const* sources, const double* weights, int64_t count, int64_t n);
void weighted_sum(int32_t* out, const int32_t* const* sources, const double* weights, int64_t count, int64_t n);
void weighted_sum(int64_t* out, const int64_t* const* sources, const double* weights, int64_t count, int64_t n);

}  // namespace penstock::ring
