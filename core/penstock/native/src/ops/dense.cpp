#include "ops/dense.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/target.h"

namespace penstock::ops {
namespace {

PENSTOCK_BODY void sgd_body(T* __restrict param, const T* __restrict grad, double lr, int64_t begin, int64_t end) {
  const T rate = static_cast<T>(lr);
  for (int64_t i = begin; i < end; ++i) {
    param[i] -= rate * grad[i];
  }
}

PENSTOCK_BODY void adam_loop(const AdamArrays<T>& arrays, const AdamStep& step, T decay, int64_t begin, int64_t end) {
  T* __restrict param = arrays.param;
  T* __restrict moment1 = arrays.moment1;
  T* __restrict moment2 = arrays.moment2;
  const T* __restrict grad = arrays.grad;
  const T weight1 = static_cast<T>(1 - step.beta1);
  const T weight2 = static_cast<T>(1 - step.beta2);
  const T beta2 = static_cast<T>(step.beta2);
  const T size = static_cast<T>(step.step_size);
  const T scale = static_cast<T>(step.inverse_sqrt_c2);
  const T epsilon = static_cast<T>(step.epsilon);
  for (int64_t i = begin; i < end; ++i) {
    const T g = decay == T(0) ? grad[i] : grad[i] + decay * param[i];
    const T m = moment1[i] + (g - moment1[i]) * weight1;
    const T v = moment2[i] * beta2 + (g * g) * weight2;
    moment1[i] = m;
    moment2[i] = v;
    param[i] -= size * m / (std::sqrt(v) * scale + epsilon);
  }
}

PENSTOCK_BODY void adam_body(const AdamArrays<T>& arrays, const AdamStep& step, int64_t begin, int64_t end) {
  if (step.weight_decay == 0) {
    adam_loop<T>(arrays, step, T(0), begin, end);
  } else {
    adam_loop<T>(arrays, step, static_cast<T>(step.weight_decay), begin, end);
  }
}

// sums[i] = first[i] + second[i]; `sums` may be one of the two.
PENSTOCK_BODY void add_into(T* sums, const T* first, const T* second, int64_t n) {
  PENSTOCK_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    sums[i] = first[i] + second[i];
  }
}

PENSTOCK_BODY void sum_block(T* __restrict sums, T* const* arrays, int64_t count, int64_t at, int64_t n) {
  add_into<T>(sums, arrays[0] + at, arrays[1] + at, n);
  for (int64_t k = 2; k < count; ++k) {
    add_into<T>(sums, sums, arrays[k] + at, n);
  }
}

// Two replicas are the common case: without the detour over a block, both stores hit lines that the loads brought.
PENSTOCK_BODY void sum_pair(T* first, T* second, int64_t begin, int64_t end) {
  PENSTOCK_INDEPENDENT
  for (int64_t i = begin; i < end; ++i) {
    const T sum = first[i] + second[i];
    first[i] = sum;
    second[i] = sum;
  }
}

PENSTOCK_BODY void all_body(T* const* arrays, int64_t count, int64_t begin, int64_t end) {
  if (count == 1) {
    return;
  }
  if (count == 2) {
    sum_pair<T>(arrays[0], arrays[1], begin, end);
    return;
  }
  constexpr int64_t kBlock = kSumBlockBytes / static_cast<int64_t>(sizeof(T));
  alignas(64) T sums[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    sum_block<T>(sums, arrays, count, at, n);
    for (int64_t k = 0; k < count; ++k) {
      std::memcpy(arrays[k] + at, sums, static_cast<size_t>(n) * sizeof(T));
    }
  }
}

PENSTOCK_BODY void one_body(T* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end) {
  if (count == 1) {
    return;
  }
  if (count == 2) {
    add_into<T>(arrays[owner] + begin, arrays[0] + begin, arrays[1] + begin, end - begin);
    return;
  }
  constexpr int64_t kBlock = kSumBlockBytes / static_cast<int64_t>(sizeof(T));
  alignas(64) T sums[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    sum_block<T>(sums, arrays, count, at, n);
    std::memcpy(arrays[owner] + at, sums, static_cast<size_t>(n) * sizeof(T));
  }
}

}  // namespace

AdamStep adam_step(const AdamSettings& settings, double lr, double t) {
  const double scale = 1 / std::sqrt(1 - std::pow(settings.beta2, t));
  const double epsilon = settings.epsilon_hat ? settings.epsilon * scale : settings.epsilon;
  const double size = lr / (1 - std::pow(settings.beta1, t));
  return {settings.beta1, settings.beta2, epsilon, settings.weight_decay, size, scale};
}

PENSTOCK_CLONES void sgd(float* param, const float* grad, double lr, int64_t begin, int64_t end) {
  sgd_body<float>(param, grad, lr, begin, end);
}
PENSTOCK_CLONES void sgd(double* param, const double* grad, double lr, int64_t begin, int64_t end) {
  sgd_body<double>(param, grad, lr, begin, end);
}

PENSTOCK_CLONES void adam(const AdamArrays<float>& arrays, const AdamStep& step, int64_t begin, int64_t end) {
  adam_body<float>(arrays, step, begin, end);
}
PENSTOCK_CLONES void adam(const AdamArrays<double>& arrays, const AdamStep& step, int64_t begin, int64_t end) {
  adam_body<double>(arrays, step, begin, end);
}

PENSTOCK_CLONES void sum_to_all(float* const* arrays, int64_t count, int64_t begin, int64_t end) {
  all_body<float>(arrays, count, begin, end);
}
PENSTOCK_CLONES void sum_to_all(double* const* arrays, int64_t count, int64_t begin, int64_t end) {
  all_body<double>(arrays, count, begin, end);
}
PENSTOCK_CLONES void sum_to_all(int32_t* const* arrays, int64_t count, int64_t begin, int64_t end) {
  all_body<int32_t>(arrays, count, begin, end);
}
PENSTOCK_CLONES void sum_to_all(int64_t* const* arrays, int64_t count, int64_t begin, int64_t end) {
  all_body<int64_t>(arrays, count, begin, end);
}

PENSTOCK_CLONES void sum_to_one(float* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end) {
  one_body<float>(arrays, count, owner, begin, end);
}
PENSTOCK_CLONES void sum_to_one(double* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end) {
  one_body<double>(arrays, count, owner, begin, end);
}
PENSTOCK_CLONES void sum_to_one(int32_t* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end) {
  one_body<int32_t>(arrays, count, owner, begin, end);
}
PENSTOCK_CLONES void sum_to_one(int64_t* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end) {
  one_body<int64_t>(arrays, count, owner, begin, end);
}

}  // namespace penstock::ops
