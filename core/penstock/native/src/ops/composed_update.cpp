#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "ops/checks.h"
#include "ops/composed.h"

namespace penstock::ops::composed {
namespace {

using at::Tensor;
using at::TensorList;

// The tensor of one element as a number of `like`'s type, on its device, without asking the host for it.
Tensor number(const Check& check, const char* name, const Tensor& tensor, const Tensor& like, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.numel() == 1, check.op(), ": ", name, " has shape ", tensor.sizes(),
                    "; expected a tensor with one element");
  return tensor.reshape({}).to(like.device(), dtype);
}

// to[index] += values, entry after entry.
void add_at(Tensor to, const Tensor& index, const Tensor& values) {
  to.index_put_(c10::List<std::optional<Tensor>>({index}), values, /*accumulate=*/true);
}

// 1 - beta^step in double.
Tensor bias_correction(double beta, const Tensor& step) {
  return 1 - at::pow(beta, step);
}

// For each entry of `rows` the sum of the values of all entries that name the same row, on CPU added in order of
// appearance. On a card torch's kernel for that adds one entry after another: a row that every sample names takes as
// long as the whole batch. That of embedding's gradient adds parts of ten entries first, in an order of its own that is
// the same each time.
// The sort gives each row a number below rows.size(0); nothing here has a size that depends on values.
Tensor merged(const Tensor& rows, const Tensor& values) {
  if (rows.size(0) == 0) {
    return values;
  }
  const auto [sorted, order] = at::sort(rows, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor starts = at::zeros_like(sorted);
  starts.narrow(0, 1, rows.size(0) - 1)
      .copy_(sorted.narrow(0, 1, rows.size(0) - 1) != sorted.narrow(0, 0, rows.size(0) - 1));
  const Tensor numbers = at::empty_like(order).scatter_(0, order, starts.cumsum(0));
  if (values.is_cuda() && values.dim() == 2) {  // its sums are made of parts of a row's entries, side by side
    return at::embedding_dense_backward(values, numbers, rows.size(0), /*padding_idx=*/-1, /*scale_grad_by_freq=*/false)
        .index_select(0, numbers);
  }
  const Tensor sums = at::zeros_like(values, at::MemoryFormat::Contiguous);
  add_at(sums, numbers, values);
  return sums.index_select(0, numbers);
}

}  // namespace

void sparse_sgd_(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& lr) {
  const Check check("penstock.sparse_sgd_");
  check.sparse_grad(param, rows, values);
  const Tensor rate = number(check, "lr", lr, param, param.scalar_type());
  if (param.is_cuda() && rows.size(0) > 0) {
    param.index_copy_(0, rows, param.index_select(0, rows) - merged(rows, values) * rate);
    return;
  }
  add_at(param, rows, (values * rate).neg());
}

void sparse_adam_(const Tensor& param, const Tensor& moment1, const Tensor& moment2, const Tensor& step,
                  const Tensor& rows, const Tensor& values, const Tensor& lr, double beta1, double beta2,
                  double epsilon) {
  const Check check("penstock.sparse_adam_");
  check.sparse_grad(param, rows, values);
  check.state("moment1", moment1, param);
  check.state("moment2", moment2, param);
  const Tensor t = number(check, "step", step, param, at::kDouble);
  const Tensor rate = number(check, "lr", lr, param, at::kDouble);
  const Tensor size = (rate * bias_correction(beta2, t).sqrt() / bias_correction(beta1, t)).to(param.scalar_type());
  const Tensor g = merged(rows, values);
  Tensor m = moment1.index_select(0, rows);
  Tensor v = moment2.index_select(0, rows);
  m += (g - m) * (1 - beta1);
  v += (g * g - v) * (1 - beta2);
  const Tensor p = param.index_select(0, rows) - size * m / (v.sqrt() + epsilon);
  // A row that appears more than once is written more than once, with the same bits.
  moment1.index_copy_(0, rows, m);
  moment2.index_copy_(0, rows, v);
  param.index_copy_(0, rows, p);
}

void sparse_adagrad_(const Tensor& param, const Tensor& moment, const Tensor& rows, const Tensor& values,
                     const Tensor& lr, double epsilon) {
  const Check check("penstock.sparse_adagrad_");
  check.sparse_grad(param, rows, values);
  check.state("moment", moment, param);
  const Tensor rate = number(check, "lr", lr, param, param.scalar_type());
  const Tensor g = merged(rows, values);
  const Tensor sum = moment.index_select(0, rows) + g * g;
  const Tensor p = param.index_select(0, rows) - rate * g / (sum.sqrt() + epsilon);
  moment.index_copy_(0, rows, sum);
  param.index_copy_(0, rows, p);
}

namespace {

void check_dense(const Check& check, const Tensor& param, const Tensor& grad) {
  check.floating("param", param);
  check.writable("param", param);
  check.same("grad", grad, "param", param);
}

// Torch's kernel for groups takes a rate in float32; they are of one dtype.
bool fits_kernel(TensorList params) {
  return !params.empty() && params[0].scalar_type() == at::kFloat;
}

struct Adam {
  double beta1, beta2, epsilon, weight_decay;
  bool epsilon_hat;
};

// A call of torch's for all tensors at each step of the formula. Its one kernel for all of Adam (_fused_adam_) rounds
// the betas to float32 first, by which 1 - beta2 is off by 1e-5 of its value.
void adam_of_group(const Check& check, TensorList params, TensorList moments1, TensorList moments2, const Tensor& step,
                   TensorList grads, const Tensor& lr, const Adam& by) {
  if (params.empty()) return;
  const auto type = params[0].scalar_type();
  const Tensor t = number(check, "step", step, params[0], at::kDouble);
  const Tensor rate = number(check, "lr", lr, params[0], at::kDouble);
  const Tensor size = (rate / bias_correction(by.beta1, t)).to(type);
  const Tensor scale = bias_correction(by.beta2, t).sqrt().reciprocal();
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<Tensor> g = grads.vec();
  if (by.weight_decay != 0) g = at::_foreach_add(g, params, by.weight_decay);
  at::_foreach_lerp_(moments1, g, 1 - by.beta1);
  at::_foreach_mul_(moments2, by.beta2);
  at::_foreach_addcmul_(moments2, g, g, 1 - by.beta2);
  const std::vector<Tensor> root = at::_foreach_sqrt(moments2);
  at::_foreach_mul_(root, scale.to(type));
  if (by.epsilon_hat) {
    at::_foreach_add_(root, (scale * by.epsilon).to(type));
  } else {
    at::_foreach_add_(root, by.epsilon);
  }
  const std::vector<Tensor> change = at::_foreach_div(moments1, root);
  at::_foreach_mul_(change, size);
  at::_foreach_sub_(params, change);
}

void sgd_of_group(const Check& check, TensorList params, TensorList velocities, TensorList grads, const Tensor& lr,
                  double momentum, bool nesterov) {
  const Tensor rate = number(check, "lr", lr, params[0], at::kFloat);
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::_fused_sgd_(params, grads, velocities, /*weight_decay=*/0, momentum, rate, /*dampening=*/0, nesterov,
                  /*maximize=*/false, /*is_first_step=*/false);
}

}  // namespace

void sgd_(const Tensor& param, const Tensor& grad, const Tensor& lr) {
  const Check check("penstock.sgd_");
  check_dense(check, param, grad);
  const Tensor rate = number(check, "lr", lr, param, param.scalar_type());
  param.sub_(grad * rate);
}

void adam_(const Tensor& param, const Tensor& moment1, const Tensor& moment2, const Tensor& step, const Tensor& grad,
           const Tensor& lr, double beta1, double beta2, double epsilon, double weight_decay, bool epsilon_hat) {
  const Check check("penstock.adam_");
  check_dense(check, param, grad);
  check.state("moment1", moment1, param);
  check.state("moment2", moment2, param);
  const Adam by{beta1, beta2, epsilon, weight_decay, epsilon_hat};
  adam_of_group(check, param, moment1, moment2, step, grad.contiguous(), lr, by);
}

void fused_sgd_(TensorList params, TensorList grads, const Tensor& lr) {
  const Check check("penstock.fused_sgd_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  if (fits_kernel(params)) {
    sgd_of_group(check, params, {}, dense, lr, /*momentum=*/0, /*nesterov=*/false);
    return;
  }
  for (size_t k = 0; k < params.size(); ++k) sgd_(params[k], dense[k], lr);
}

void fused_momentum_(TensorList params, TensorList velocities, TensorList grads, const Tensor& lr, double momentum,
                     bool nesterov) {
  const Check check("penstock.fused_momentum_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  check.states("velocities", params, velocities);
  if (fits_kernel(params)) {
    sgd_of_group(check, params, velocities, dense, lr, momentum, nesterov);
    return;
  }
  for (size_t k = 0; k < params.size(); ++k) {
    const Tensor rate = number(check, "lr", lr, params[k], params[k].scalar_type());
    velocities[k].mul_(momentum).add_(dense[k]);
    params[k].sub_((nesterov ? dense[k] + velocities[k] * momentum : velocities[k]) * rate);
  }
}

void fused_adagrad_(TensorList params, TensorList moments, TensorList grads, const Tensor& lr, double epsilon) {
  const Check check("penstock.fused_adagrad_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  check.states("moments", params, moments);
  for (size_t k = 0; k < params.size(); ++k) {
    const Tensor rate = number(check, "lr", lr, params[k], params[k].scalar_type());
    moments[k].addcmul_(dense[k], dense[k]);
    params[k].sub_(dense[k] * rate / (moments[k].sqrt() + epsilon));
  }
}

void fused_adam_(TensorList params, TensorList moments1, TensorList moments2, const Tensor& step, TensorList grads,
                 const Tensor& lr, double beta1, double beta2, double epsilon, double weight_decay, bool epsilon_hat) {
  const Check check("penstock.fused_adam_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  check.states("moments1", params, moments1);
  check.states("moments2", params, moments2);
  const Adam by{beta1, beta2, epsilon, weight_decay, epsilon_hat};
  adam_of_group(check, params, moments1, moments2, step, dense, lr, by);
}

}  // namespace penstock::ops::composed
