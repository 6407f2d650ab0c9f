// The operators made of torch's own, for devices that have no kernel of ours (CUDA).
//
// Invariant: on CPU tensors they give what the CPU kernels give (tests/native/ops/test_composed_operators.py): sums in
// order of appearance, the same Philox bits.  They never wait for the device: what a CPU kernel reads from a tensor to
// check it (ids, the step) is not checked here, and an id outside its table is the device's own assertion.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace penstock::ops::composed {

// composed_update.cpp
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
void fused_sgd_(at::TensorList params, at::TensorList grads, const at::Tensor& lr);
void fused_momentum_(at::TensorList params, at::TensorList velocities, at::TensorList grads, const at::Tensor& lr,
                     double momentum, bool nesterov);
void fused_adagrad_(at::TensorList params, at::TensorList moments, at::TensorList grads, const at::Tensor& lr,
                    double epsilon);
void fused_adam_(at::TensorList params, at::TensorList moments1, at::TensorList moments2, const at::Tensor& step,
                 at::TensorList grads, const at::Tensor& lr, double beta1, double beta2, double epsilon,
                 double weight_decay, bool epsilon_hat);

// composed_sequences.cpp
std::tuple<at::Tensor, at::Tensor> sequence_pool(const at::Tensor& x, const at::Tensor& lengths, c10::string_view kind,
                                                 double pad);
at::Tensor sequence_pool_backward(const at::Tensor& grad, const at::Tensor& index, const at::Tensor& lengths,
                                  int64_t rows, c10::string_view kind);
at::Tensor sequence_rows(const at::Tensor& lengths, int64_t rows, c10::string_view kind);

// composed_attention.cpp
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             double dropout_p, bool is_causal,
                                             const std::optional<at::Tensor>& attn_mask, std::optional<double> scale);
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                                                  const at::Tensor& key, const at::Tensor& value,
                                                                  const at::Tensor& out, const at::Tensor& logsumexp,
                                                                  double dropout_p, bool is_causal,
                                                                  const std::optional<at::Tensor>& attn_mask,
                                                                  std::optional<double> scale);

// composed_exchange.cpp: the tensors of a list may lie on different devices
void all_reduce_(at::TensorList tensors);
void reduce_(at::TensorList tensors, int64_t owner);
void broadcast_(at::TensorList destinations, const at::Tensor& source);
void fused_broadcast_(at::TensorList destinations, at::TensorList sources);
at::Tensor gather_rows(at::TensorList parts, int64_t owner);

// composed_values.cpp
at::Tensor lookup_table(const at::Tensor& table, const at::Tensor& ids, int64_t padding_idx);
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& x, const at::Tensor& rng, double p, bool training,
                                           int64_t op_seed, int64_t batch_dim, int64_t rows_per_sample);
at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double p, bool training);
at::Tensor auc(const at::Tensor& predict, const at::Tensor& label, const at::Tensor& stat_pos,
               const at::Tensor& stat_neg);
std::tuple<at::Tensor, at::Tensor, at::Tensor> accuracy(const at::Tensor& topk_indices, const at::Tensor& label);

}  // namespace penstock::ops::composed
