#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>

#include <exception>
#include <string>

#include "ops/checks.h"
#include "ops/operators_fused.h"

// oneDNN's matmul, private to torch, for any transposes of both operands and for batches. Weak: a torch may lack it,
// and one that has it may refuse the processor; `penstock.native.matrix_probe` finds out before a plan names it.
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

// A left operand that lies transposed is copied; where that is more than the right one and the result, (w' x')' is
// made.
Tensor linear_of_any_layout(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
  const bool swap = !bias && !x.is_contiguous() && x.numel() > w.numel() + x.size(0) * w.size(1);
  return swap ? linear(w.t(), x.t(), bias).t().contiguous() : linear(x, w, bias);
}

Tensor transposed(const Tensor& tensor, bool transpose) {
  return transpose ? tensor.transpose(-2, -1) : tensor;
}

void check_kernel(const Check& check, c10::string_view kernel, const Tensor& x) {
  TORCH_CHECK_VALUE(kernel == "torch" || kernel == "onednn" || kernel == "onednn_matmul", check.op(), ": kernel is '",
                    kernel, "'; expected torch, onednn or onednn_matmul");
  TORCH_CHECK_VALUE(kernel == "torch" || x.device().is_cpu(), check.op(), ": x is on ", x.device(), "; the kernel ",
                    kernel, " multiplies on CPU");
  TORCH_CHECK_TYPE(kernel == "torch" || x.scalar_type() == at::kFloat, check.op(), ": x has dtype ", x.scalar_type(),
                   "; the kernel ", kernel, " expects Float");
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

Tensor by_private_matmul(const Tensor& x, const Tensor& w) {
  TORCH_CHECK(at::native::mkldnn_matmul != nullptr, "this torch has no at::native::mkldnn_matmul");
  Tensor out = x.dim() == 2 ? at::empty({x.size(0), w.size(1)}, x.options())
                            : at::empty({x.size(0), x.size(1), w.size(2)}, x.options());
  at::native::mkldnn_matmul(x, w, out, 0.0F, 1.0F);
  return out;
}

// `onednn` has no batches, `onednn_matmul` no bias: what the one lacks the other does, and torch what both lack.
Tensor by_onednn(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, c10::string_view activation,
                 bool matmul) {
  Tensor out;
  if (matmul && !bias) {
    out = by_private_matmul(x, w);
  } else if (x.dim() == 2) {
    out = linear_of_any_layout(x, w, bias);
  } else {
    out = product_of(x, w);
  }
  activate_(out, {activation.data(), activation.size()}, 1.0);
  return out;
}

// Without the frames that torch adds.
std::string message_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known == nullptr ? error.what() : known->what_without_backtrace();
}

}  // namespace

Tensor product_by(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, bool transpose_x,
                  bool transpose_w, c10::string_view activation, c10::string_view kernel) {
  const Check check("penstock.product");
  const Tensor left = transposed(x, transpose_x), right = transposed(w, transpose_w);
  check_kernel(check, kernel, x);
  check_shapes(check, left, right);
  TORCH_CHECK_VALUE(!bias || (left.dim() == 2 && bias->dim() == 1 && bias->size(0) == right.size(1)), check.op(),
                    ": bias has shape ", bias ? bias->sizes() : at::IntArrayRef(), "; expected [", right.size(-1), "]");
  if (kernel == "torch" || left.numel() == 0 || right.numel() == 0) return by_torch(left, right, bias, activation);
  return by_onednn(left, right, bias, activation, kernel == "onednn_matmul");
}

Tensor product(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, bool transpose_x, bool transpose_w,
               c10::string_view activation, c10::string_view kernel) {
  try {
    return product_by(x, w, bias, transpose_x, transpose_w, activation, kernel);
  } catch (const c10::ValueError&) {  // the arguments: no kernel could
    throw;
  } catch (const c10::TypeError&) {
    throw;
  } catch (const std::exception& error) {
    if (kernel == "torch") throw;
    TORCH_WARN_ONCE("the matrix kernel ", kernel, " failed on ", x.sizes(), " by ", w.sizes(), " (", message_of(error),
                    "); torch's kernel takes its place");
    return product_by(x, w, bias, transpose_x, transpose_w, activation, "torch");
  }
}

int64_t mkl_vendor_check() {
  return mkl_serv_intel_cpu_true == nullptr ? -1 : mkl_serv_intel_cpu_true();
}

}  // namespace penstock::ops
