// Checks of operator arguments.  Each message says which operator was called, what it got and what it wants.
//
// Errors map to Python's TypeError (dtype), ValueError (shape, value) and IndexError (a position outside a range).
// One of the two files of the operator library that know torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <vector>

namespace penstock::ops {

// The checks of one operator; `op` is its name for messages and outlives the object.
class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  void floating(const char* name, const at::Tensor& tensor) const {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble, op_, ": ", name,
                     " has dtype ", tensor.scalar_type(), "; expected Float or Double");
  }

  void dtype(const char* name, const at::Tensor& tensor, at::ScalarType expected) const {
    TORCH_CHECK_TYPE(tensor.scalar_type() == expected, op_, ": ", name, " has dtype ", tensor.scalar_type(),
                     "; expected ", expected);
  }

  void dim(const char* name, const at::Tensor& tensor, int64_t expected, const char* layout) const {
    TORCH_CHECK_VALUE(tensor.dim() == expected, op_, ": ", name, " has shape ", tensor.sizes(), "; expected ", layout);
  }

  // What is written in place must be contiguous: a copy would lose the result.
  void writable(const char* name, const at::Tensor& tensor) const {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), op_, ": ", name, " of shape ", tensor.sizes(), " has strides ",
                      tensor.strides(), ", but it is updated in place and must be contiguous; keep ", name,
                      ".contiguous() instead of a view");
  }

  // `tensor` has the shape and dtype of `like`.
  void same(const char* name, const at::Tensor& tensor, const char* like_name, const at::Tensor& like) const {
    dtype(name, tensor, like.scalar_type());
    TORCH_CHECK_VALUE(tensor.sizes() == like.sizes(), op_, ": ", name, " has shape ", tensor.sizes(), "; expected ",
                      like.sizes(), ", the shape of ", like_name);
  }

  // Optimizer state: written in place, shaped like the parameter.
  void state(const char* name, const at::Tensor& tensor, const at::Tensor& param) const {
    same(name, tensor, "param", param);
    writable(name, tensor);
  }

  // The value of a tensor with one element.
  double scalar(const char* name, const at::Tensor& tensor) const {
    TORCH_CHECK_VALUE(tensor.numel() == 1, op_, ": ", name, " has shape ", tensor.sizes(),
                      "; expected a tensor with one element");
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return static_cast<double>(*tensor.const_data_ptr<float>());
      case at::kDouble:
        return *tensor.const_data_ptr<double>();
      case at::kLong:
        return static_cast<double>(*tensor.const_data_ptr<int64_t>());
      default:
        TORCH_CHECK_TYPE(false, op_, ": ", name, " has dtype ", tensor.scalar_type(),
                         "; expected Float, Double or Long");
    }
  }

  // The number of optimizer steps, this one included.
  double step(const at::Tensor& tensor) const {
    const double value = scalar("step", tensor);
    TORCH_CHECK_VALUE(value >= 1, op_, ": step is ", value,
                      "; expected at least 1: the count is incremented before the update");
    return value;
  }

  // `rows` int64[n] within the table, `values` [n, d] of its dtype.
  void sparse_grad(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values) const {
    floating("param", param);
    dim("param", param, 2, "[rows, width]");
    writable("param", param);
    dtype("rows", rows, at::kLong);
    dim("rows", rows, 1, "[n]");
    dtype("values", values, param.scalar_type());
    TORCH_CHECK_VALUE(values.dim() == 2 && values.size(0) == rows.size(0) && values.size(1) == param.size(1), op_,
                      ": values has shape ", values.sizes(), "; expected [", rows.size(0), ", ", param.size(1),
                      "], one row of param's width for each entry of rows");
  }

  // Gradients of a group of parameters of one dtype that are updated at once, in contiguous form.
  std::vector<at::Tensor> dense_grads(at::TensorList params, at::TensorList grads) const {
    TORCH_CHECK_VALUE(params.size() == grads.size(), op_, ": got ", params.size(), " params and ", grads.size(),
                      " grads; expected one for each");
    std::vector<at::Tensor> dense;
    dense.reserve(grads.size());
    for (size_t k = 0; k < params.size(); ++k) {
      floating("a param", params[k]);
      dtype("a param", params[k], params[0].scalar_type());
      writable("a param", params[k]);
      same("a grad", grads[k], "its param", params[k]);
      dense.push_back(grads[k].contiguous());
    }
    return dense;
  }

  // The optimizer state of such a group.
  void states(const char* name, at::TensorList params, at::TensorList states) const {
    TORCH_CHECK_VALUE(params.size() == states.size(), op_, ": got ", params.size(), " params and ", states.size(), " ",
                      name, "; expected one for each");
    for (size_t k = 0; k < params.size(); ++k) {
      state(name, states[k], params[k]);
    }
  }

  const char* op() const { return op_; }

 private:
  const char* op_;
};

}  // namespace penstock::ops
