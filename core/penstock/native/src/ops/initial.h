// Seeded initial values.  Element i is a function of (seed, i) and the distribution's parameters only.
//
// Only integer operations and IEEE +, -, *, / and sqrt are used (no libm), in double, rounded to the array's type once
// at the end: the same bits on every machine and for every split of the work.
#pragma once

#include <cstdint>

namespace penstock::ops {

struct Normal {
  double mean;
  double std;
};

struct TruncatedNormal {  // cut off at two standard deviations on either side
  double mean;
  double std;
};

struct Uniform {  // in [low, high)
  double low;
  double high;
};

// Write elements [begin, end) of the array.
void fill(float* out, const Normal& values, int64_t seed, int64_t begin, int64_t end);
void fill(double* out, const Normal& values, int64_t seed, int64_t begin, int64_t end);
void fill(float* out, const TruncatedNormal& values, int64_t seed, int64_t begin, int64_t end);
void fill(double* out, const TruncatedNormal& values, int64_t seed, int64_t begin, int64_t end);
void fill(float* out, const Uniform& values, int64_t seed, int64_t begin, int64_t end);
void fill(double* out, const Uniform& values, int64_t seed, int64_t begin, int64_t end);

}  // namespace penstock::ops
