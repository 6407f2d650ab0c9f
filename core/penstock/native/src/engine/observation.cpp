#include "engine/observation.h"

#include <algorithm>

namespace penstock {

bool Observation::Call::Layout::operator==(const Layout& other) const {
  return type == other.type && nbytes == other.nbytes && sizes == other.sizes && strides == other.strides;
}

Observation::Call::Layout Observation::Call::layout_of(const at::Tensor& tensor, std::uint32_t position) {
  const auto bytes = tensor.storage().nbytes();
  return {position, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(), bytes};
}

Observation::Call::Call(Observation& observation, std::uint32_t instruction, const torch::jit::Stack& arguments)
    : observation_(observation),
      instruction_(instruction),
      allocations_(observation.allocations_[instruction]),
      layouts_(Layouts::of(arguments)) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor()) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    if (!tensor.defined() || !tensor.has_storage() || tensor.storage_offset() != 0) continue;
    arguments_.push_back(layout_of(tensor, static_cast<std::uint32_t>(i)));
  }
}

c10::DataPtr Observation::Call::allocate(std::size_t nbytes) {
  const auto same = [nbytes](const Allocation& allocation) { return allocation.nbytes == nbytes; };
  const auto before = std::count_if(allocations_.begin(), allocations_.end(), same);
  c10::DataPtr memory = allocate_metered(nbytes, observation_.meter_);
  allocations_.push_back({memory.get(), nbytes, static_cast<std::uint32_t>(before)});
  return memory;
}

void Observation::Call::freed(const void* memory) noexcept {
  for (Allocation& allocation : allocations_) {
    if (allocation.memory == memory) allocation.freed = true;
  }
}

void Observation::Call::returned(const torch::jit::Stack& results) {
  for (std::uint32_t i = 0; i < results.size(); ++i) {
    if (results[i].isTensor()) keep(results[i].toTensor(), i, 0);
    if (!results[i].isTensorList()) continue;
    const std::vector<at::Tensor> list = results[i].toTensorVector();
    for (std::uint32_t k = 0; k < list.size(); ++k) keep(list[k], i, k);
  }
}

void Observation::Call::keep(const at::Tensor& tensor, std::uint32_t value, std::uint32_t place) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto mine = [&](const Allocation& a) { return !a.freed && a.memory == tensor.storage().data(); };
  const auto found = std::find_if(allocations_.begin(), allocations_.end(), mine);
  if (found == allocations_.end()) return;
  found->results.emplace_back(value, place);
  found->twins.clear();
  if (found->results.size() != 1 || tensor.storage_offset() != 0) return;
  const Layout layout = layout_of(tensor, 0);
  for (const Layout& argument : arguments_) {
    if (argument == layout && tensor.is_non_overlapping_and_dense()) found->twins.push_back(argument.position);
  }
  if (!found->twins.empty()) observation_.layouts_[instruction_] = layouts_;
}

}  // namespace penstock
