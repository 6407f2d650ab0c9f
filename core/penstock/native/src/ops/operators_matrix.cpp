#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>

#include "ops/checks.h"
#include "ops/operators_fused.h"

// oneDNN's product as torch 2.10 to 2.13 export it, for any transposes of both operands. Weak: where a torch does not
// have it, the operator that torch registers for its compiler takes over (which copies a transposed left operand).
namespace at::native {
__attribute__((weak)) void mkldnn_matmul(const Tensor& x, const Tensor& w, const Tensor& out, float beta, float alpha);
}

// MKL asks itself whether the processor is its vendor's; preloading a library with this name answers for it.
extern "C" __attribute__((weak)) int mkl_serv_intel_cpu_true();

namespace penstock::ops {

using at::Tensor;

namespace {

using LinearPointwise = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, c10::string_view,
                               c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);

// Not with its own relu: that one gives 0 for NaN, where torch's passes NaN on.
Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
  static const auto call =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<LinearPointwise>();
  // It multiplies by the transpose of its second operand, whatever that one's strides are; a bias it reads as dense.
  const auto dense = bias ? std::optional<Tensor>(bias->contiguous()) : std::nullopt;
  return call.call(x, w.t(), dense, "none", c10::List<std::optional<at::Scalar>>(), "");
}

Tensor transposed(const Tensor& tensor, bool transpose) {
  return transpose ? tensor.transpose(-2, -1) : tensor;
}

void check_kernel(const Check& check, c10::string_view kernel, const Tensor& x) {
  TORCH_CHECK_VALUE(kernel == "torch" || kernel == "onednn", check.op(), ": kernel is '", kernel,
                    "'; expected torch or onednn");
  TORCH_CHECK_VALUE(kernel == "torch" || x.device().is_cpu(), check.op(), ": x is on ", x.device(),
                    "; the kernel onednn multiplies on CPU");
  TORCH_CHECK_TYPE(kernel == "torch" || x.scalar_type() == at::kFloat, check.op(), ": x has dtype ", x.scalar_type(),
                   "; the kernel onednn expects Float");
}

void check_shapes(const Check& check, const Tensor& x, const Tensor& w) {
  const bool fits = x.dim() == w.dim() && (x.dim() == 2 || x.dim() == 3) && x.size(-1) == w.size(-2) &&
                    (x.dim() == 2 || x.size(0) == w.size(0));
  TORCH_CHECK_VALUE(fits, check.op(), ": cannot multiply ", x.sizes(), " by ", w.sizes(),
                    "; expected [m, k] and [k, n], or [b, m, k] and [b, k, n]");
}

Tensor product_of(const Tensor& x, const Tensor& w) {
  return x.dim() == 2 ? at::mm(x, w) : at::bmm(x, w);
}

Tensor by_torch(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, c10::string_view activation) {
  Tensor out = bias ? at::addmm(*bias, x, w) : product_of(x, w);
  activate_(out, {activation.data(), activation.size()}, 1.0);
  return out;
}

Tensor by_onednn(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, c10::string_view activation) {
  Tensor out;
  if (x.dim() == 2 && (bias || at::native::mkldnn_matmul == nullptr)) {
    out = linear(x, w, bias);
  } else if (at::native::mkldnn_matmul == nullptr) {
    out = product_of(x, w);
  } else {
    out = x.dim() == 2 ? at::empty({x.size(0), w.size(1)}, x.options())
                       : at::empty({x.size(0), x.size(1), w.size(2)}, x.options());
    at::native::mkldnn_matmul(x, w, out, 0.0F, 1.0F);
  }
  activate_(out, {activation.data(), activation.size()}, 1.0);
  return out;
}

}  // namespace

Tensor product(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, bool transpose_x, bool transpose_w,
               c10::string_view activation, c10::string_view kernel) {
  const Check check("penstock.product");
  const Tensor left = transposed(x, transpose_x), right = transposed(w, transpose_w);
  check_kernel(check, kernel, x);
  check_shapes(check, left, right);
  TORCH_CHECK_VALUE(!bias || (left.dim() == 2 && bias->dim() == 1 && bias->size(0) == right.size(1)), check.op(),
                    ": bias has shape ", bias ? bias->sizes() : at::IntArrayRef(), "; expected [", right.size(-1), "]");
  if (kernel == "torch" || left.numel() == 0 || right.numel() == 0) return by_torch(left, right, bias, activation);
  return by_onednn(left, right, bias, activation);
}

int64_t mkl_vendor_check() {
  return mkl_serv_intel_cpu_true == nullptr ? -1 : mkl_serv_intel_cpu_true();
}

}  // namespace penstock::ops
