// How a TorchPlan calls its operators on devices with streams (see device.h).
#include <stdexcept>
#include <utility>

#include "engine/torch_plan.h"

namespace penstock {

void TorchPlan::use_devices(std::shared_ptr<DevicePlan> devices) {
  check_idle("be put on devices");
  devices_ = std::move(devices);
}

void TorchPlan::call_on_device(Instruction& instruction, std::uint32_t index, torch::jit::Stack& stack) {
  DevicePlan::Call call(*devices_, index, stack);
  instruction.op->callBoxed(&stack);
  call.launched();
}

}  // namespace penstock
