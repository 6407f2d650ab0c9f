#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/operators.h"
#include "ops/operators_fused.h"

namespace penstock::ops {

using at::Tensor;

void activate_(Tensor& tensor, std::string_view activation, double scale) {
  if (activation == "relu") {
    at::relu_(tensor);
  } else if (activation == "sigmoid") {
    at::sigmoid_(tensor);
  } else if (activation == "tanh") {
    at::tanh_(tensor);
  } else if (activation == "scale") {
    tensor.mul_(scale);
  } else {
    TORCH_CHECK_VALUE(activation == "none", "penstock: activation is '", activation,
                      "'; expected none, relu, sigmoid, tanh or scale");
  }
}

namespace {

// x dense and y either like it or one row of it: what one loop over rows can add.
bool adds_by_rows(const Tensor& x, const Tensor& y) {
  if (x.scalar_type() != y.scalar_type() || x.dim() < 1 || x.numel() == 0 || !x.is_contiguous() || !y.is_contiguous()) {
    return false;
  }
  if (!x.device().is_cpu() || !y.device().is_cpu()) return false;
  const bool floating = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
  return floating && (x.sizes() == y.sizes() || (y.dim() == 1 && y.size(0) == x.size(-1)));
}

}  // namespace

Tensor fused_add_act(const Tensor& x, const Tensor& y, c10::string_view activation, double scale) {
  if (activation != "relu" || !adds_by_rows(x, y)) {
    Tensor sum = at::add(x, y);
    activate_(sum, {activation.data(), activation.size()}, scale);
    return sum;
  }
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t width = x.size(-1);
  const bool y_is_row = y.numel() != x.numel();
  with_floating(x, [&](auto type) {
    using T = decltype(type);
    T* to = out.mutable_data_ptr<T>();
    const T* left = x.const_data_ptr<T>();
    const T* right = y.const_data_ptr<T>();
    at::parallel_for(0, x.numel() / width, grain_of_rows(width),
                     [&](int64_t begin, int64_t end) { add_relu(to, left, right, width, y_is_row, begin, end); });
  });
  return out;
}

}  // namespace penstock::ops
