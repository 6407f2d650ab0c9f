#include "engine/layouts.h"

#include <cstddef>

namespace penstock {
namespace {

bool is_list_of_tensors(const c10::IValue& value) {
  return value.isTensorList() || value.isOptionalTensorList();
}

bool has_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

}  // namespace

std::optional<Layouts> Layouts::of(const torch::jit::Stack& arguments) {
  Layouts found;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (is_list_of_tensors(arguments[i])) return std::nullopt;
    if (!has_tensor(arguments[i])) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    if (tensor.layout() != c10::kStrided || tensor.is_nested() || !tensor.has_storage()) return std::nullopt;
    found.tensors_.push_back({static_cast<std::uint32_t>(i), tensor.key_set(), tensor.scalar_type(),
                              tensor.storage_offset(), tensor.sizes().vec(), tensor.strides().vec()});
  }
  return found;
}

bool Layouts::match(const torch::jit::Stack& arguments) const {
  std::size_t next = 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (is_list_of_tensors(arguments[i])) return false;
    if (!has_tensor(arguments[i])) continue;
    if (next == tensors_.size() || tensors_[next].position != i) return false;
    const One& known = tensors_[next++];
    const at::Tensor& tensor = arguments[i].toTensor();
    // The keys first: what is not strided has no strides to ask for.
    if (tensor.key_set() != known.keys || tensor.scalar_type() != known.type ||
        tensor.storage_offset() != known.offset || tensor.sizes() != known.sizes || tensor.strides() != known.strides) {
      return false;
    }
  }
  return next == tensors_.size();
}

}  // namespace penstock
