#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros_like.h>

#include "ops/checks.h"
#include "ops/composed.h"

namespace penstock::ops::composed {
namespace {

using at::Tensor;

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

// For each entry of `rows` the sum of the values of all entries that name the same row, added in order of appearance.
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
  const Tensor sums = at::zeros_like(values, at::MemoryFormat::Contiguous);
  add_at(sums, numbers, values);
  return sums.index_select(0, numbers);
}

}  // namespace

void sparse_sgd_(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& lr) {
  const Check check("penstock.sparse_sgd_");
  check.sparse_grad(param, rows, values);
  const Tensor rate = number(check, "lr", lr, param, param.scalar_type());
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

void sgd_(const Tensor& param, const Tensor& grad, const Tensor& lr) {
  const Check check("penstock.sgd_");
  check.floating("param", param);
  check.writable("param", param);
  check.same("grad", grad, "param", param);
  const Tensor rate = number(check, "lr", lr, param, param.scalar_type());
  param.sub_(grad * rate);
}

void adam_(const Tensor& param, const Tensor& moment1, const Tensor& moment2, const Tensor& step, const Tensor& grad,
           const Tensor& lr, double beta1, double beta2, double epsilon, double weight_decay, bool epsilon_hat) {
  const Check check("penstock.adam_");
  check.floating("param", param);
  check.writable("param", param);
  check.state("moment1", moment1, param);
  check.state("moment2", moment2, param);
  check.same("grad", grad, "param", param);
  const Tensor t = number(check, "step", step, param, at::kDouble);
  const Tensor rate = number(check, "lr", lr, param, at::kDouble);
  const Tensor size = (rate / bias_correction(beta1, t)).to(param.scalar_type());
  const Tensor scale = bias_correction(beta2, t).sqrt().reciprocal();
  const Tensor g = weight_decay == 0 ? grad : grad + param * weight_decay;
  moment1.add_((g - moment1) * (1 - beta1));
  moment2.mul_(beta2).add_((g * g) * (1 - beta2));
  const Tensor root = moment2.sqrt() * scale.to(param.scalar_type());
  param.sub_(size * moment1 / (epsilon_hat ? root + (scale * epsilon).to(param.scalar_type()) : root + epsilon));
}

}  // namespace penstock::ops::composed
