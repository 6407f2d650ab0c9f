#include "ops/ring/sums.h"

#include <algorithm>
#include <cstring>

#include "ops/target.h"

namespace penstock::ring {
namespace {

constexpr int64_t kBlockBytes = 8192;  // of each array at once: they stay in the L1 cache

PENSTOCK_BODY void add_into(T* out, const T* first, const T* second, int64_t n) {
  PENSTOCK_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    out[i] = first[i] + second[i];
  }
}

// `out` may be any of the sources: a block is summed beside them.
PENSTOCK_BODY void sum_body(T* out, const T* const* sources, int64_t count, int64_t n) {
  if (count == 1) {
    if (out != sources[0]) std::memcpy(out, sources[0], static_cast<size_t>(n) * sizeof(T));
    return;
  }
  if (count == 2) {
    add_into<T>(out, sources[0], sources[1], n);
    return;
  }
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));
  alignas(64) T sums[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t m = std::min(kBlock, n - at);
    add_into<T>(sums, sources[0] + at, sources[1] + at, m);
    for (int64_t k = 2; k < count; ++k) {
      add_into<T>(sums, sums, sources[k] + at, m);
    }
    std::memcpy(out + at, sums, static_cast<size_t>(m) * sizeof(T));
  }
}

PENSTOCK_BODY void weigh_body(T* out, const T* const* sources, int64_t count, double weight, int64_t n) {
  if (weight == 0) {
    std::fill(out, out + n, T(0));
    return;
  }
  const T factor = static_cast<T>(weight);
  if (count == 1 && weight != 1) {
    const T* source = sources[0];
    PENSTOCK_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      out[i] = factor * source[i];
    }
    return;
  }
  sum_body<T>(out, sources, count, n);
  if (weight != 1) {
    PENSTOCK_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      out[i] = factor * out[i];
    }
  }
}

PENSTOCK_BODY void weighted_sum_body(T* out, const T* const* sources, const double* weights, int64_t count, int64_t n) {
  if (std::all_of(weights, weights + count, [](double weight) { return weight == 1; })) {
    sum_body<T>(out, sources, count, n);
    return;
  }
  if (count == 2 && weights[0] != 0 && weights[1] != 0) {
    const T *first = sources[0], *second = sources[1];
    const T one = static_cast<T>(weights[0]), other = static_cast<T>(weights[1]);
    PENSTOCK_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      out[i] = one * first[i] + other * second[i];
    }
    return;
  }
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));
  alignas(64) T sums[kBlock], part[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t m = std::min(kBlock, n - at);
    for (int64_t k = 0; k < count; ++k) {
      const T* source = sources[k] + at;
      weigh_body<T>(k == 0 ? sums : part, &source, 1, weights[k], m);
      if (k > 0) add_into<T>(sums, sums, part, m);
    }
    std::memcpy(out + at, sums, static_cast<size_t>(m) * sizeof(T));
  }
}

}  // namespace

PENSTOCK_CLONES void weigh(float* out, const float* const* sources, int64_t count, double weight, int64_t n) {
  weigh_body<float>(out, sources, count, weight, n);
}
PENSTOCK_CLONES void weigh(double* out, const double* const* sources, int64_t count, double weight, int64_t n) {
  weigh_body<double>(out, sources, count, weight, n);
}
PENSTOCK_CLONES void weigh(int32_t* out, const int32_t* const* sources, int64_t count, double weight, int64_t n) {
  weigh_body<int32_t>(out, sources, count, weight, n);
}
PENSTOCK_CLONES void weigh(int64_t* out, const int64_t* const* sources, int64_t count, double weight, int64_t n) {
  weigh_body<int64_t>(out, sources, count, weight, n);
}

PENSTOCK_CLONES void sum(float* out, const float* const* sources, int64_t count, int64_t n) {
  sum_body<float>(out, sources, count, n);
}
PENSTOCK_CLONES void sum(double* out, const double* const* sources, int64_t count, int64_t n) {
  sum_body<double>(out, sources, count, n);
}
PENSTOCK_CLONES void sum(int32_t* out, const int32_t* const* sources, int64_t count, int64_t n) {
  sum_body<int32_t>(out, sources, count, n);
}
PENSTOCK_CLONES void sum(int64_t* out, const int64_t* const* sources, int64_t count, int64_t n) {
  sum_body<int64_t>(out, sources, count, n);
}
PENSTOCK_CLONES void weighted_sum(float* out, const float* const* sources, const double* weights, int64_t count,
                                  int64_t n) {
  weighted_sum_body<float>(out, sources, weights, count, n);
}
PENSTOCK_CLONES void weighted_sum(double* out, const double* const* sources, const double* weights, int64_t count,
                                  int64_t n) {
  weighted_sum_body<double>(out, sources, weights, count, n);
}
PENSTOCK_CLONES void weighted_sum(int32_t* out, const int32_t* const* sources, const double* weights, int64_t count,
                                  int64_t n) {
  weighted_sum_body<int32_t>(out, sources, weights, count, n);
}
PENSTOCK_CLONES void weighted_sum(int64_t* out, const int64_t* const* sources, const double* weights, int64_t count,
                                  int64_t n) {
  weighted_sum_body<int64_t>(out, sources, weights, count, n);
}

}  // namespace penstock::ring
