#include "engine/torch_plan.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <utility>

#include "engine/allocator.h"
#include "engine/threads.h"

namespace penstock {
namespace {

bool is_optional_tensor_list(const c10::OperatorHandle& op, std::size_t position) {
  const auto list = op.schema().arguments()[position].type()->cast<c10::ListType>();
  return list && list->getElementType()->kind() == c10::TypeKind::OptionalType;
}

std::string describe(const c10::IValue& value) {
  if (value.isNone()) return "None";
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return "undefined";
    std::ostringstream text;
    text << c10::toString(tensor.scalar_type()) << tensor.sizes();
    return text.str();
  }
  if (value.isTensorList()) {
    std::string text = "(";
    for (const at::Tensor& tensor : value.toTensorVector()) text += (text.size() > 1 ? ", " : "") + describe(tensor);
    return text + ")";
  }
  if (value.isDouble() || value.isInt() || value.isBool() || value.isIntList()) {
    std::ostringstream text;
    text << value;
    return text.str();
  }
  return value.tagKind();
}

std::string describe(const torch::jit::Stack& stack) {
  std::string text;
  for (const c10::IValue& value : stack) text += (text.empty() ? "" : ", ") + describe(value);
  return text;
}

std::string describe(const TorchPlan::Tensors& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) text += (text.empty() ? "" : ", ") + describe(c10::IValue(tensor));
  return text;
}

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace

TorchPlan::TorchPlan(std::size_t num_slots) : slots_(num_slots), kept_(num_slots, 0) {}

std::int32_t TorchPlan::checked_slot(std::int64_t slot) const {
  if (slot < 0 || static_cast<std::size_t>(slot) >= slots_.size()) {
    throw std::invalid_argument("slot " + std::to_string(slot) + " does not exist; the plan has slots 0 to " +
                                std::to_string(static_cast<std::int64_t>(slots_.size()) - 1));
  }
  return static_cast<std::int32_t>(slot);
}

void TorchPlan::check_idle(const char* what) const {
  if (running_.load()) throw std::invalid_argument(std::string("the plan is running; it cannot ") + what + " now");
}

void TorchPlan::check_outputs(const c10::OperatorHandle& op, const std::vector<Output>& outputs) const {
  const auto& returns = op.schema().returns();
  if (outputs.size() != returns.size()) {
    throw std::invalid_argument(toString(op.operator_name()) + " returns " + std::to_string(returns.size()) +
                                " values, but " + std::to_string(outputs.size()) + " outputs were given");
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool returns_list = returns[i].type()->kind() == c10::TypeKind::ListType;
    if (outputs[i].is_list && !returns_list) {
      throw std::invalid_argument(toString(op.operator_name()) + " returns no list as value " + std::to_string(i) +
                                  ", but a list of slots was given for it");
    }
    for (const std::int32_t slot : outputs[i].slots) {
      if (slot != -1) checked_slot(slot);
    }
  }
}

std::uint32_t TorchPlan::add(const c10::OperatorHandle& op, std::vector<Argument> arguments,
                             std::vector<Output> outputs, std::uint32_t op_index, std::int32_t affinity, bool on_host) {
  for (const Argument& argument : arguments) {
    for (const std::int32_t slot : argument.slots) {
      if (slot != -1 || argument.kind == Argument::Kind::kSlot) checked_slot(slot);
    }
  }
  check_outputs(op, outputs);
  const std::uint32_t index = schedule_.add(op_index, affinity, on_host);
  instructions_.push_back(Instruction{.op = op, .arguments = std::move(arguments), .outputs = std::move(outputs)});
  return index;
}

std::uint32_t TorchPlan::add_host(HostFunction function, std::vector<std::int32_t> inputs,
                                  std::vector<std::int32_t> outputs, std::uint32_t op_index) {
  std::vector<Argument> arguments;
  for (const std::int32_t slot : inputs) {
    arguments.push_back(Argument{.kind = Argument::Kind::kSlot, .slots = {checked_slot(slot)}});
  }
  std::vector<Output> returned;
  for (const std::int32_t slot : outputs) {
    returned.push_back(Output{.slots = {slot == -1 ? -1 : checked_slot(slot)}});
  }
  const std::uint32_t index = schedule_.add(op_index, -1, true);
  instructions_.push_back(Instruction{.op = std::nullopt,
                                      .function = std::move(function),
                                      .arguments = std::move(arguments),
                                      .outputs = std::move(returned)});
  return index;
}

void TorchPlan::edge(std::uint32_t before, std::uint32_t after) {
  schedule_.edge(before, after);
}

void TorchPlan::keep(std::int64_t slot) {
  checked_slot(slot);
  if (schedule_.sealed()) throw std::invalid_argument("a sealed plan keeps no more slots");
  kept_[static_cast<std::size_t>(slot)] = 1;
}

std::string TorchPlan::name_of(std::uint32_t instruction) const {
  const auto& op = instructions_[instruction].op;
  return std::to_string(instruction) + " (" + (op ? toString(op->operator_name()) : "host") + ")";
}

std::string TorchPlan::describe_cycle(const std::vector<std::uint32_t>& cycle) const {
  std::string text = "the plan has a cycle: ";
  constexpr std::size_t kShown = 8;
  for (std::size_t i = 0; i <= cycle.size() && i <= kShown; ++i) {
    text += (i == 0 ? "" : " -> ") + name_of(cycle[i % cycle.size()]);
  }
  return cycle.size() > kShown ? text + " -> ..." : text;
}

void TorchPlan::seal() {
  try {
    schedule_.seal();
  } catch (const CycleError& error) {
    throw std::invalid_argument(describe_cycle(error.cycle));
  }
  std::vector<std::uint32_t> producers(slots_.size(), 0);
  count_uses(producers);
  check_conflicts();
  for (Instruction& instruction : instructions_) lower(instruction, producers);
  unread_ = std::make_unique<std::atomic<std::uint32_t>[]>(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) unread_[i].store(num_readers_[i], std::memory_order_relaxed);
  sealed_ = true;
}

void TorchPlan::count_uses(std::vector<std::uint32_t>& producers) {
  num_readers_.assign(slots_.size(), 0);
  for (Instruction& instruction : instructions_) {
    std::vector<std::int32_t>& read = instruction.reads;
    for (const Argument& argument : instruction.arguments) {
      read.insert(read.end(), argument.slots.begin(), argument.slots.end());
    }
    std::sort(read.begin(), read.end());
    read.erase(std::unique(read.begin(), read.end()), read.end());
    if (!read.empty() && read.front() < 0) read.erase(read.begin());  // None
    for (const std::int32_t slot : read) ++num_readers_[static_cast<std::size_t>(slot)];
    for (const Output& output : instruction.outputs) {
      for (const std::int32_t slot : output.slots) {
        if (slot < 0) continue;
        ++producers[static_cast<std::size_t>(slot)];
        instruction.writes.push_back(slot);
      }
    }
  }
}

void TorchPlan::lower(Instruction& instruction, const std::vector<std::uint32_t>& producers) {
  std::vector<std::int32_t> uses;  // in the order in which push_arguments() reads them
  for (const Argument& argument : instruction.arguments) {
    uses.insert(uses.end(), argument.slots.begin(), argument.slots.end());
  }
  std::size_t position = 0;
  const auto moves = [&](std::int32_t slot) {
    const bool last_here =
        std::find(uses.begin() + static_cast<std::ptrdiff_t>(++position), uses.end(), slot) == uses.end();
    if (slot < 0 || kept_[static_cast<std::size_t>(slot)]) return false;
    // A slot written more than once holds versions whose readers are counted together: it is never moved out of.
    const bool moves_out =
        num_readers_[static_cast<std::size_t>(slot)] == 1 && producers[static_cast<std::size_t>(slot)] <= 1;
    if (!moves_out && last_here) releases_.push_back(slot);
    return moves_out && last_here;
  };
  instruction.first_load = static_cast<std::uint32_t>(loads_.size());
  instruction.first_release = static_cast<std::uint32_t>(releases_.size());
  const c10::OperatorHandle* op = instruction.op ? &*instruction.op : nullptr;
  for (std::size_t i = 0; i < instruction.arguments.size(); ++i) {
    lower_argument(instruction.arguments[i], op, i, moves);
  }
  instruction.last_load = static_cast<std::uint32_t>(loads_.size());
  instruction.last_release = static_cast<std::uint32_t>(releases_.size());
  instruction.arguments.clear();
  for (Output& output : instruction.outputs) {
    for (std::int32_t& slot : output.slots) {
      // What is neither read nor retained is dropped at once.
      if (slot >= 0 && num_readers_[static_cast<std::size_t>(slot)] == 0 && !kept_[static_cast<std::size_t>(slot)])
        slot = -1;
    }
  }
  if (instruction.outputs.size() == 1 && !instruction.outputs[0].is_list) {
    instruction.only_output = instruction.outputs[0].slots[0];
  }
}

void TorchPlan::lower_argument(const Argument& argument, const c10::OperatorHandle* op, std::size_t position,
                               const std::function<bool(std::int32_t)>& moves) {
  using Kind = Load::Kind;
  switch (argument.kind) {
    case Argument::Kind::kConstant:
      loads_.push_back({Kind::kConstant, static_cast<std::uint32_t>(constants_.size())});
      constants_.push_back(argument.constant);
      return;
    case Argument::Kind::kSlot:
      loads_.push_back(
          {moves(argument.slots[0]) ? Kind::kMove : Kind::kCopy, static_cast<std::uint32_t>(argument.slots[0])});
      return;
    case Argument::Kind::kSlots: {
      const bool optional = op != nullptr && is_optional_tensor_list(*op, position);
      loads_.push_back({optional ? Kind::kOptionalTensors : Kind::kTensors, static_cast<std::uint32_t>(lists_.size())});
      std::vector<ListItem> items;
      for (const std::int32_t slot : argument.slots) items.push_back({slot, moves(slot)});
      lists_.push_back(std::move(items));
      return;
    }
  }
}

void TorchPlan::set(std::int64_t slot, at::Tensor tensor) {
  check_idle("take a tensor");
  slots_[static_cast<std::size_t>(checked_slot(slot))] = std::move(tensor);
}

void TorchPlan::set_all(const std::vector<std::int64_t>& slots, Tensors tensors) {
  check_idle("take tensors");
  if (slots.size() != tensors.size()) throw std::invalid_argument("as many slots as tensors are needed");
  for (const std::int64_t slot : slots) checked_slot(slot);
  for (std::size_t i = 0; i < slots.size(); ++i) slots_[static_cast<std::size_t>(slots[i])] = std::move(tensors[i]);
}

const c10::Argument& TorchPlan::parameter(std::uint32_t instruction, std::size_t position) const {
  if (instruction >= instructions_.size() || !instructions_[instruction].op ||
      position >= instructions_[instruction].op->schema().arguments().size()) {
    throw std::invalid_argument("instruction " + std::to_string(instruction) + " has no argument " +
                                std::to_string(position));
  }
  return instructions_[instruction].op->schema().arguments()[position];
}

void TorchPlan::set_constant(std::uint32_t instruction, std::size_t position, c10::IValue value) {
  check_idle("take a constant");
  parameter(instruction, position);
  const Load& load = loads_.at(instructions_[instruction].first_load + position);
  if (!sealed_ || load.kind != Load::Kind::kConstant) {
    throw std::invalid_argument("argument " + std::to_string(position) + " of instruction " + name_of(instruction) +
                                " is no constant of a sealed plan");
  }
  constants_[load.index] = std::move(value);
}

std::optional<at::Tensor> TorchPlan::get(std::int64_t slot) const {
  check_idle("give a tensor");
  const c10::IValue& value = slots_[static_cast<std::size_t>(checked_slot(slot))];
  if (!value.isTensor()) return std::nullopt;
  return value.toTensor();
}

void TorchPlan::clear(std::int64_t slot) {
  check_idle("clear a slot");
  slots_[static_cast<std::size_t>(checked_slot(slot))] = c10::IValue();
}

std::optional<Failure> TorchPlan::run(Engine& engine, int intra_op_threads, std::uint64_t step, std::uint64_t seed) {
  if (!sealed_) throw std::invalid_argument("the plan is not sealed");
  if (running_.exchange(true)) throw EngineStateError("the plan is running already");
  intra_op_threads_ = intra_op_threads;
  if (stacks_.size() < engine.workers()) stacks_.resize(engine.workers());
  begin_memory(stacks_.size());
  std::optional<Failure> failure;
  try {
    failure = engine.run(schedule_, Kernel{this, &TorchPlan::run_instruction}, step, seed);
  } catch (...) {
    end_memory(false);
    running_.store(false);
    throw;
  }
  if (failure) empty_temporaries();
  end_memory(!failure);
  running_.store(false);
  return failure;
}

void TorchPlan::empty_temporaries() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!kept_[i]) slots_[i] = c10::IValue();
    unread_[i].store(num_readers_[i], std::memory_order_relaxed);
  }
}

void TorchPlan::run_instruction(void* context, std::uint32_t index, std::uint32_t thread) {
  auto& plan = *static_cast<TorchPlan*>(context);
  Instruction& instruction = plan.instructions_[index];
  if (!instruction.op) {
    plan.call_function(instruction);
  } else if (thread < plan.stacks_.size()) {
    plan.call_operator(instruction, index, thread, plan.stacks_[thread]);
  } else {
    torch::jit::Stack stack;
    plan.call_operator(instruction, index, thread, stack);
  }
}

void TorchPlan::call_operator(Instruction& instruction, std::uint32_t index, std::uint32_t thread,
                              torch::jit::Stack& stack) {
  try {
    push_arguments(instruction, stack);
    if (devices_ != nullptr) {
      call_on_device(instruction, index, stack);
    } else if (in_memory_ && thread < stacks_.size()) {
      call_in_memory(instruction, index, thread, stack);
    } else {
      instruction.op->callBoxed(&stack);
    }
    store(instruction, stack);
  } catch (const std::exception& error) {
    KernelError described(message_of(error), describe(stack));
    stack.clear();
    throw described;
  } catch (...) {
    stack.clear();
    throw;
  }
  stack.clear();
  release_inputs(instruction);
  hold_intra_op_threads(intra_op_threads_);
}

void TorchPlan::push_arguments(const Instruction& instruction, torch::jit::Stack& stack) {
  const Load* load = loads_.data() + instruction.first_load;
  const Load* end = loads_.data() + instruction.last_load;
  for (; load != end; ++load) {
    switch (load->kind) {
      case Load::Kind::kConstant:
        stack.push_back(constants_[load->index]);
        break;
      case Load::Kind::kCopy:
        stack.push_back(slots_[load->index]);
        break;
      case Load::Kind::kMove:
        stack.push_back(std::move(slots_[load->index]));
        break;
      case Load::Kind::kTensors:
      case Load::Kind::kOptionalTensors:
        push_list(*load, stack);
        break;
    }
  }
}

void TorchPlan::push_list(const Load& load, torch::jit::Stack& stack) {
  const std::vector<ListItem>& items = lists_[load.index];
  const auto take = [this](const ListItem& item) {
    c10::IValue& slot = slots_[static_cast<std::size_t>(item.slot)];
    return item.move ? std::move(slot).toTensor() : slot.toTensor();
  };
  if (load.kind == Load::Kind::kTensors) {
    c10::List<at::Tensor> list;
    list.reserve(items.size());
    for (const ListItem& item : items) list.push_back(item.slot < 0 ? at::Tensor() : take(item));
    stack.emplace_back(std::move(list));
    return;
  }
  c10::List<std::optional<at::Tensor>> list;
  list.reserve(items.size());
  for (const ListItem& item : items) {
    list.push_back(item.slot < 0 ? std::optional<at::Tensor>() : std::optional<at::Tensor>(take(item)));
  }
  stack.emplace_back(std::move(list));
}

void TorchPlan::store(const Instruction& instruction, torch::jit::Stack& stack) {
  if (instruction.only_output >= 0) {
    slots_[static_cast<std::size_t>(instruction.only_output)] = std::move(stack.back());
    return;
  }
  for (std::size_t i = 0; i < instruction.outputs.size(); ++i) {
    const Output& output = instruction.outputs[i];
    if (!output.is_list) {
      store_one(output.slots[0], std::move(stack[i]));
      continue;
    }
    const c10::List<at::Tensor> list = stack[i].toTensorList();
    TORCH_CHECK(list.size() == output.slots.size(), "returned ", list.size(), " tensors, but the plan has ",
                output.slots.size(), " slots for them");
    for (std::size_t k = 0; k < output.slots.size(); ++k) store_one(output.slots[k], list.get(k));
  }
}

void TorchPlan::store_one(std::int32_t slot, c10::IValue value) {
  if (slot >= 0) slots_[static_cast<std::size_t>(slot)] = std::move(value);
}

void TorchPlan::release_inputs(const Instruction& instruction) {
  for (std::uint32_t i = instruction.first_release; i < instruction.last_release; ++i) {
    const auto slot = static_cast<std::size_t>(releases_[i]);
    if (unread_[slot].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    unread_[slot].store(num_readers_[slot], std::memory_order_relaxed);  // for the next run
    slots_[slot] = c10::IValue();
  }
}

void TorchPlan::call_function(Instruction& instruction) {
  torch::jit::Stack stack;
  push_arguments(instruction, stack);
  Tensors inputs;
  for (const c10::IValue& value : stack) inputs.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
  stack.clear();
  Tensors outputs;
  try {
    outputs = instruction.function(inputs);
  } catch (const std::exception& error) {
    throw KernelError(message_of(error), describe(inputs));
  }
  if (outputs.size() != instruction.outputs.size()) {
    throw KernelError("the host function returned " + std::to_string(outputs.size()) + " tensors, but " +
                          std::to_string(instruction.outputs.size()) + " were expected",
                      describe(inputs));
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) store_one(instruction.outputs[i].slots[0], std::move(outputs[i]));
  inputs.clear();
  release_inputs(instruction);
}

c10::DataPtr allocate_shared(std::size_t nbytes) {
  static const auto make =
      c10::Dispatcher::singleton().findSchemaOrThrow("penstock::ring_memory", "").typed<at::Tensor(std::int64_t)>();
  auto held = std::make_unique<at::Tensor>(make.call(static_cast<std::int64_t>(nbytes)));
  void* const begin = held->mutable_data_ptr();
  return {begin, held.release(), [](void* tensor) { delete static_cast<at::Tensor*>(tensor); }, c10::kCPU};
}

}  // namespace penstock
