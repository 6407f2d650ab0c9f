// Runs of a plan that are observed, and runs whose tensors lie where a placement says.
#include <stdexcept>
#include <utility>

#include "engine/torch_plan.h"

namespace penstock {

void TorchPlan::observe() {
  check_idle("be observed");
  if (!sealed_) throw std::invalid_argument("a plan is observed after seal()");
  install_allocator();
  placement_.reset();
  observed_ = false;
  observation_ = std::make_unique<Observation>(instructions_.size());
}

void TorchPlan::place(std::unique_ptr<Placement> placement) {
  check_idle("be placed");
  install_allocator();
  placement_ = std::move(placement);
  if (observed_) {
    layouts_.assign(instructions_.size(), std::nullopt);
    for (std::uint32_t i = 0; i < instructions_.size(); ++i) {
      if (placement_->takes_over(i)) layouts_[i] = observation_->layouts(i);
    }
  }
  observation_.reset();
  observed_ = false;
}

std::int64_t TorchPlan::unplanned_peak() const noexcept {
  if (placement_) return placement_->meter().peak();
  return observation_ ? observation_->meter().peak() : 0;
}

void TorchPlan::begin_memory(std::size_t num_threads) {
  if (placement_) placement_->begin_run(num_threads);
  in_memory_ = placement_ != nullptr || (observation_ != nullptr && !observed_);
}

void TorchPlan::end_memory(bool whole) {
  if (placement_) placement_->end_run();
  if (observation_ && !observed_) {
    observed_ = whole;
    if (!whole) observation_ = std::make_unique<Observation>(instructions_.size());
  }
  in_memory_ = false;
}

bool TorchPlan::as_observed(std::uint32_t index, const torch::jit::Stack& stack) const {
  return index < layouts_.size() && layouts_[index] && layouts_[index]->match(stack);
}

void TorchPlan::call_in_memory(Instruction& instruction, std::uint32_t index, std::uint32_t thread,
                               torch::jit::Stack& stack) {
  if (placement_) {
    Placement::Call call(*placement_, index, thread);
    const std::int32_t operand = call.operand();
    if (operand >= 0 && stack[static_cast<std::size_t>(operand)].isTensor() && as_observed(index, stack)) {
      const Load& load = loads_[instruction.first_load + static_cast<std::uint32_t>(operand)];
      // Moved: the stack has it. Copied: its slot has it too, until this instruction, its last reader, lets go.
      call.offer(stack[static_cast<std::size_t>(operand)].toTensor(), load.kind == Load::Kind::kMove ? 1 : 2);
    }
    instruction.op->callBoxed(&stack);
    return;
  }
  Observation::Call call(*observation_, index, stack);
  instruction.op->callBoxed(&stack);
  call.returned(stack);
}

}  // namespace penstock
