// Operators that passes put in the place of several others.
//
// Invariant: as in operators.h; an argument that names a kernel or an activation is checked before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace penstock::ops {

// operators_fused.cpp
void activate_(at::Tensor& tensor, std::string_view activation, double scale);
at::Tensor fused_add_act(const at::Tensor& x, const at::Tensor& y, c10::string_view activation, double scale);

// operators_pool.cpp
std::tuple<at::Tensor, at::Tensor> max_pool_2x2(const at::Tensor& x, bool relu);
at::Tensor max_pool_2x2_backward(const at::Tensor& grad, const at::Tensor& places);

// operators_matrix.cpp
// `product` falls back to torch's kernel, with a warning, where another one fails; `product_by` raises.
at::Tensor product(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, bool transpose_x,
                   bool transpose_w, c10::string_view activation, c10::string_view kernel);
at::Tensor product_by(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, bool transpose_x,
                      bool transpose_w, c10::string_view activation, c10::string_view kernel);
int64_t mkl_vendor_check();

// operators_tables.cpp
at::Tensor lookup_concat(at::TensorList tables, at::TensorList ids, at::IntArrayRef padding_idx, at::TensorList parts,
                         at::IntArrayRef order);
void fused_sparse_sgd_(at::TensorList params, at::TensorList rows, at::TensorList values, at::IntArrayRef pieces,
                       at::TensorList lengths, at::IntArrayRef ragged, const at::Tensor& lr);
void fused_sparse_adam_(at::TensorList params, at::TensorList moments1, at::TensorList moments2, const at::Tensor& step,
                        at::TensorList rows, at::TensorList values, at::IntArrayRef pieces, at::TensorList lengths,
                        at::IntArrayRef ragged, const at::Tensor& lr, double beta1, double beta2, double epsilon);
void fused_sparse_adagrad_(at::TensorList params, at::TensorList moments, at::TensorList rows, at::TensorList values,
                           at::IntArrayRef pieces, at::TensorList lengths, at::IntArrayRef ragged, const at::Tensor& lr,
                           double epsilon);

}  // namespace penstock::ops
