// Operators that passes put in the place of several others.
//
// Invariant: as in operators.h; an argument that names a kernel or an activation is checked before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace penstock::ops {

// operators_fused.cpp
void activate_(at::Tensor& tensor, std::string_view activation, double scale);
at::Tensor fused_add_act(const at::Tensor& x, const at::Tensor& y, c10::string_view activation, double scale);

// operators_matrix.cpp
// `product` falls back to torch's kernel, with a warning, where another one fails; `product_by` raises.
at::Tensor product(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, bool transpose_x,
                   bool transpose_w, c10::string_view activation, c10::string_view kernel);
at::Tensor product_by(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, bool transpose_x,
                      bool transpose_w, c10::string_view activation, c10::string_view kernel);
int64_t mkl_vendor_check();

}  // namespace penstock::ops
