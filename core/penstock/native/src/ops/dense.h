// Dense element-wise kernels over ranges [begin, end) of contiguous arrays: optimizer updates and gradient exchange.
//
// A caller may cut an array into ranges in any way and run them on any threads: elements do not depend on each other,
// so the result has the same bits.  No allocation, no exceptions.
#pragma once

#include <cstdint>

namespace penstock::ops {

// param -= lr * grad
void sgd(float* param, const float* grad, double lr, int64_t begin, int64_t end);
void sgd(double* param, const double* grad, double lr, int64_t begin, int64_t end);

// What an Adam step needs besides the arrays; the arrays' type rounds these once, inside the kernel.
struct AdamStep {
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  double step_size;        // lr / (1 - beta1^step)
  double inverse_sqrt_c2;  // 1 / sqrt(1 - beta2^step)
};

// `epsilon_hat`: epsilon is added to the uncorrected root of the second moment (adam_op of Fluid 1.8), not to the
// corrected one (torch.optim.Adam).  Kingma and Ba, section 2: the same update with epsilon / sqrt(1 - beta2^step).
struct AdamSettings {
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  bool epsilon_hat;
};

// `t`: the number of this step, from 1.
AdamStep adam_step(const AdamSettings& settings, double lr, double t);

template <typename T>
struct AdamArrays {
  T* param;
  T* moment1;
  T* moment2;
  const T* grad;
};

// One pass of Adam (weight decay is L2: added to the gradient).
void adam(const AdamArrays<float>& arrays, const AdamStep& step, int64_t begin, int64_t end);
void adam(const AdamArrays<double>& arrays, const AdamStep& step, int64_t begin, int64_t end);

// Elements of at most this many bytes per array are in flight at once in the sums below: they stay in the L1 cache.
inline constexpr int64_t kSumBlockBytes = 8192;

// arrays[k][i] = ((arrays[0][i] + arrays[1][i]) + arrays[2][i]) + ... for every k.  `count` is at least 1.
void sum_to_all(float* const* arrays, int64_t count, int64_t begin, int64_t end);
void sum_to_all(double* const* arrays, int64_t count, int64_t begin, int64_t end);
void sum_to_all(int32_t* const* arrays, int64_t count, int64_t begin, int64_t end);
void sum_to_all(int64_t* const* arrays, int64_t count, int64_t begin, int64_t end);

// The same sum, in the same order, into arrays[owner] only.
void sum_to_one(float* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end);
void sum_to_one(double* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end);
void sum_to_one(int32_t* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end);
void sum_to_one(int64_t* const* arrays, int64_t count, int64_t owner, int64_t begin, int64_t end);

}  // namespace penstock::ops
