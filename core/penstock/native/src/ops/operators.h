// The operators as functions on tensors: argument checks, choice of dtype and threads around the kernels.
//
// Invariant: an operator that raises has written nothing.  No state but per-thread scratch, no Python: callable from
// any thread without the interpreter lock.  Work is split with at::parallel_for, which honours the calling thread's
// intra-op setting; no result depends on the split.  docs/operators.md says what each one computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>

namespace penstock::ops {

// operators_update.cpp
void sparse_sgd_(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& lr);
void sparse_adam_(const at::Tensor& param, const at::Tensor& moment1, const at::Tensor& moment2, const at::Tensor& step,
                  const at::Tensor& rows, const at::Tensor& values, const at::Tensor& lr, double beta1, double beta2,
                  double epsilon);
void sparse_adagrad_(const at::Tensor& param, const at::Tensor& moment, const at::Tensor& rows,
                     const at::Tensor& values, const at::Tensor& lr, double epsilon);
void sgd_(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& lr);
void adam_(const at::Tensor& param, const at::Tensor& moment1, const at::Tensor& moment2, const at::Tensor& step,
           const at::Tensor& grad, const at::Tensor& lr, double beta1, double beta2, double epsilon,
           double weight_decay, bool epsilon_hat);
// One of `num_parts` parts of the same update: the bits are those of the whole, whatever their number and order.
void sparse_sgd_part_(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& lr,
                      int64_t part, int64_t num_parts);
void sparse_adam_part_(const at::Tensor& param, const at::Tensor& moment1, const at::Tensor& moment2,
                       const at::Tensor& step, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& lr,
                       double beta1, double beta2, double epsilon, int64_t part, int64_t num_parts);
void sparse_adagrad_part_(const at::Tensor& param, const at::Tensor& moment, const at::Tensor& rows,
                          const at::Tensor& values, const at::Tensor& lr, double epsilon, int64_t part,
                          int64_t num_parts);
void sgd_part_(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& lr, int64_t part, int64_t num_parts);
void adam_part_(const at::Tensor& param, const at::Tensor& moment1, const at::Tensor& moment2, const at::Tensor& step,
                const at::Tensor& grad, const at::Tensor& lr, double beta1, double beta2, double epsilon,
                double weight_decay, bool epsilon_hat, int64_t part, int64_t num_parts);
void all_reduce_(at::TensorList tensors);
void reduce_(at::TensorList tensors, int64_t owner);
void all_reduce_part_(at::TensorList tensors, int64_t part, int64_t num_parts);
void reduce_part_(at::TensorList tensors, int64_t owner, int64_t part, int64_t num_parts);
void broadcast_(at::TensorList destinations, const at::Tensor& source);

// operators_grouped.cpp
void fused_all_reduce_(at::TensorList tensors, int64_t replicas);
void fused_sgd_(at::TensorList params, at::TensorList grads, const at::Tensor& lr);
void fused_momentum_(at::TensorList params, at::TensorList velocities, at::TensorList grads, const at::Tensor& lr,
                     double momentum, bool nesterov);
void fused_adagrad_(at::TensorList params, at::TensorList moments, at::TensorList grads, const at::Tensor& lr,
                    double epsilon);
void fused_adam_(at::TensorList params, at::TensorList moments1, at::TensorList moments2, const at::Tensor& step,
                 at::TensorList grads, const at::Tensor& lr, double beta1, double beta2, double epsilon,
                 double weight_decay, bool epsilon_hat);

// batch_norm.cpp
at::Tensor batch_norm_stats(const at::Tensor& x);
std::tuple<at::Tensor, at::Tensor, at::Tensor> sync_batch_norm(const at::Tensor& x,
                                                               const std::optional<at::Tensor>& weight,
                                                               const std::optional<at::Tensor>& bias,
                                                               const std::optional<at::Tensor>& running_mean,
                                                               const std::optional<at::Tensor>& running_var,
                                                               const at::Tensor& stats, double momentum, double eps);
at::Tensor batch_norm_grad_stats(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& mean,
                                 const at::Tensor& invstd);
std::tuple<at::Tensor, at::Tensor, at::Tensor> sync_batch_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                                        const std::optional<at::Tensor>& weight,
                                                                        const at::Tensor& mean,
                                                                        const at::Tensor& invstd, const at::Tensor& own,
                                                                        const at::Tensor& stats);

// operators_values.cpp
at::Tensor lookup_table(const at::Tensor& table, const at::Tensor& ids, int64_t padding_idx);
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& x, const at::Tensor& rng, double p, bool training,
                                           int64_t op_seed, int64_t batch_dim, int64_t rows_per_sample);
at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double p, bool training);
at::Tensor normal(at::IntArrayRef size, double mean, double std, int64_t seed, at::ScalarType dtype);
at::Tensor truncated_normal(at::IntArrayRef size, double mean, double std, int64_t seed, at::ScalarType dtype);
at::Tensor uniform(at::IntArrayRef size, double low, double high, int64_t seed, at::ScalarType dtype);
at::Tensor scale_loss_grad(const at::Tensor& like, double value);
at::Tensor auc(const at::Tensor& predict, const at::Tensor& label, const at::Tensor& stat_pos,
               const at::Tensor& stat_neg);
std::tuple<at::Tensor, at::Tensor, at::Tensor> accuracy(const at::Tensor& topk_indices, const at::Tensor& label);

inline constexpr int64_t kGrain = 32768;  // elements: less work than this is not worth waking a thread

inline int64_t grain_of_rows(int64_t width) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
}

// Call `body` with a value of the tensor's element type, which a check has found to be float or double.
template <typename Body>
void with_floating(const at::Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    body(double{});
  }
}

}  // namespace penstock::ops
