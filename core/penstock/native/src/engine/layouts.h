// How the tensors among an operator's arguments are laid out: what its result's layout follows from.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace penstock {

class Layouts {
 public:
  // None where an argument has no layout to compare: lists of tensors, tensors that are not strided.
  static std::optional<Layouts> of(const torch::jit::Stack& arguments);
  // Whether the tensors have the same types, sizes, strides and offsets, and lie at the same positions.
  bool match(const torch::jit::Stack& arguments) const;

 private:
  struct One {
    std::uint32_t position;
    c10::DispatchKeySet keys;
    c10::ScalarType type;
    std::int64_t offset;
    std::vector<std::int64_t> sizes, strides;
  };
  std::vector<One> tensors_;
};

}  // namespace penstock
