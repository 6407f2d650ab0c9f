#include "ops/initial.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/philox.h"
#include "ops/target.h"

namespace penstock::ops {
namespace {

// Everything has to become part of a clone: a call from AVX-512 code to a function compiled for SSE costs 10 times the
// function itself (measured).
#define INLINED inline __attribute__((always_inline))

constexpr int64_t kPerBlock = 2 * kPhiloxLanes;  // two words make one double
constexpr double kCdfAtMinusTwo = 0.022750131948179195;

// Natural logarithm of a normal positive number, to about 1e-16.
INLINED double log_of(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000FFFFFFFFFFFFFULL) | 0x3FF0000000000000ULL);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1) / (m + 1);  // log m = 2 artanh s, |s| < 0.172
  const double square = s * s;
  double series = 0;
  for (int k = 25; k >= 1; k -= 2) {
    series = series * square + 1.0 / k;
  }
  return static_cast<double>(exponent) * 0.69314718055994530942 + 2 * s * series;
}

INLINED double ratio(const double (&above)[8], const double (&below)[8], double r) {
  double numerator = above[0];
  double denominator = below[0];
  for (int k = 1; k < 8; ++k) {
    numerator = numerator * r + above[k];
    denominator = denominator * r + below[k];
  }
  return numerator / denominator;
}

// Inverse of the normal distribution function: M. J. Wichura, Algorithm AS 241 (1988), relative error about 1e-16.
INLINED double inverse_cdf(double p) {
  constexpr double kA[8] = {2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
                            13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608};
  constexpr double kB[8] = {5226.495278852854561,  28729.085735721942674, 39307.89580009271061,  21213.794301586595867,
                            5394.1960214247511077, 687.1870074920579083,  42.313330701600911252, 1};
  constexpr double kC[8] = {7.7454501427834140764e-4, .0227238449892691845833, .24178072517745061177,
                            1.27045825245236838258,   3.64784832476320460504,  5.7694972214606914055,
                            4.6303378461565452959,    1.42343711074968357734};
  constexpr double kD[8] = {
      1.05075007164441684324e-9, 5.475938084995344946e-4, .0151986665636164571966, .14810397642748007459,
      .68976733498510000455,     1.6763848301838038494,   2.05319162663775882187,  1};
  constexpr double kE[8] = {2.01033439929228813265e-7, 2.71155556874348757815e-5, .0012426609473880784386,
                            .026532189526576123093,    .29656057182850489123,     1.7848265399172913358,
                            5.4637849111641143699,     6.6579046435011037772};
  constexpr double kF[8] = {
      2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
      .0148753612908506148525,    .13692988092273580531,    .59983220655588793769,    1};
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    return q * ratio(kA, kB, 0.180625 - q * q);
  }
  const double r = std::sqrt(-log_of(q < 0 ? p : 1 - p));
  const double x = r <= 5 ? ratio(kC, kD, r - 1.6) : ratio(kE, kF, r - 5);
  return q < 0 ? -x : x;
}

template <typename T>
INLINED T value_of(const Normal& values, double u) {
  return static_cast<T>(values.mean + values.std * inverse_cdf(u));
}

template <typename T>
INLINED T value_of(const TruncatedNormal& values, double u) {
  const double z = inverse_cdf(kCdfAtMinusTwo + (1 - 2 * kCdfAtMinusTwo) * u);
  return static_cast<T>(values.mean + values.std * std::clamp(z, -2.0, 2.0));
}

template <typename T>
INLINED T value_of(const Uniform& values, double u) {
  const T value = static_cast<T>(values.low + (values.high - values.low) * u);
  const T high = static_cast<T>(values.high);
  return value < high ? value : std::max(std::nextafter(high, static_cast<T>(values.low)), static_cast<T>(values.low));
}

// Uniform in (0, 1), neither end included: the middle of one of 2^52 equal intervals.
INLINED double unit(uint32_t low, uint32_t high) {
  const uint64_t word = (static_cast<uint64_t>(high) << 32 | low) >> 12;
  return (static_cast<double>(word) + 0.5) * 0x1p-52;
}

template <typename T, typename Distribution>
INLINED void fill_range(T* out, const Distribution& values, int64_t seed, int64_t begin, int64_t end) {
  const PhiloxStream stream = philox_stream(seed, 0, 0);
  uint32_t words[4][kPhiloxLanes];
  for (int64_t block = begin / kPerBlock; block * kPerBlock < end; ++block) {
    philox_block(stream, static_cast<uint64_t>(block) * kPhiloxLanes, words);
    const int64_t to = std::min(end, (block + 1) * kPerBlock);
    for (int64_t i = std::max(begin, block * kPerBlock); i < to; ++i) {
      const int64_t lane = i % kPhiloxLanes;
      const int64_t pair = i / kPhiloxLanes % 2 * 2;
      out[i] = value_of<T>(values, unit(words[pair][lane], words[pair + 1][lane]));
    }
  }
}

}  // namespace

PENSTOCK_CLONES void fill(float* out, const Normal& values, int64_t seed, int64_t begin, int64_t end) {
  fill_range(out, values, seed, begin, end);
}
PENSTOCK_CLONES void fill(double* out, const Normal& values, int64_t seed, int64_t begin, int64_t end) {
  fill_range(out, values, seed, begin, end);
}
PENSTOCK_CLONES void fill(float* out, const TruncatedNormal& values, int64_t seed, int64_t begin, int64_t end) {
  fill_range(out, values, seed, begin, end);
}
PENSTOCK_CLONES void fill(double* out, const TruncatedNormal& values, int64_t seed, int64_t begin, int64_t end) {
  fill_range(out, values, seed, begin, end);
}
PENSTOCK_CLONES void fill(float* out, const Uniform& values, int64_t seed, int64_t begin, int64_t end) {
  fill_range(out, values, seed, begin, end);
}
PENSTOCK_CLONES void fill(double* out, const Uniform& values, int64_t seed, int64_t begin, int64_t end) {
  fill_range(out, values, seed, begin, end);
}

}  // namespace penstock::ops
