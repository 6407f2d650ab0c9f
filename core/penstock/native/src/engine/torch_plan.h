// A lowered graph: operators with constant arguments converted once, and tensors in numbered slots.
//
// Invariants after seal()
//  * Two instructions that use a slot, one of which writes it, are ordered by a path of edges.
//  * A slot is released with its last use, unless it is kept: a slot that one instruction reads is moved into that
//    instruction's call, one with several readers is cleared by the reader that brings its counter to zero.
//  * Slots are touched by the instructions of the run in progress only; set(), get() and clear() are refused then.
//  * After a failed run all slots that are not kept are empty.
//  * Where results lie changes no result (see placement.h).
// Calls go through the dispatcher, boxed, on a stack that each thread reuses.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/device.h"
#include "engine/engine.h"
#include "engine/observation.h"
#include "engine/placement.h"

namespace penstock {

class TorchPlan {
 public:
  using Tensors = std::vector<at::Tensor>;
  using HostFunction = std::function<Tensors(const Tensors&)>;

  // One argument of a call, in schema order.
  struct Argument {
    enum class Kind : std::uint8_t { kConstant, kSlot, kSlots } kind;
    c10::IValue constant{};             // kConstant
    std::vector<std::int32_t> slots{};  // kSlot: one; kSlots: -1 is None
  };
  // Where a return value goes: one slot, no slot (dropped), or one for each tensor of a list.
  struct Output {
    bool is_list = false;
    std::vector<std::int32_t> slots{};  // -1: dropped
  };

  explicit TorchPlan(std::size_t num_slots);

  std::uint32_t add(const c10::OperatorHandle& op, std::vector<Argument> arguments, std::vector<Output> outputs,
                    std::uint32_t op_index, std::int32_t affinity, bool on_host);
  std::uint32_t add_host(HostFunction function, std::vector<std::int32_t> inputs, std::vector<std::int32_t> outputs,
                         std::uint32_t op_index);
  void edge(std::uint32_t before, std::uint32_t after);
  void keep(std::int64_t slot);
  void seal();

  void set(std::int64_t slot, at::Tensor tensor);
  void set_all(const std::vector<std::int64_t>& slots, Tensors tensors);  // all or none
  std::optional<at::Tensor> get(std::int64_t slot) const;
  // Give a constant argument of a sealed plan another value of the same type; parameter() says which.
  void set_constant(std::uint32_t instruction, std::size_t position, c10::IValue value);
  const c10::Argument& parameter(std::uint32_t instruction, std::size_t position) const;
  void clear(std::int64_t slot);

  // Memory. The next run notes what each instruction allocates; observed() is null until a run has done so without
  // failing. From place() on, runs allocate as the placement says; memory is taken over only where arguments are laid
  // out as they were observed, for the result's layout follows from them.
  void observe();
  const Observation* observed() const noexcept { return observed_ ? observation_.get() : nullptr; }
  void place(std::unique_ptr<Placement> placement);
  const Placement* placement() const noexcept { return placement_.get(); }
  // The most that allocations without a place have held at once, since observe() or place().
  std::int64_t unplanned_peak() const noexcept;

  // Runs between devices->begin() and end() from now on call each instruction on its streams.
  void use_devices(std::shared_ptr<DevicePlan> devices);

  std::uint32_t num_instructions() const noexcept { return schedule_.size(); }
  std::size_t num_slots() const noexcept { return slots_.size(); }
  std::uint32_t op_index(std::uint32_t instruction) const { return schedule_.node(instruction).op; }

  // Runs once on `engine`, each operator with `intra_op_threads`, which the engine's threads have set. Slots that are
  // not kept are empty afterwards if it failed.
  std::optional<Failure> run(Engine& engine, int intra_op_threads, std::uint64_t step, std::uint64_t seed);

  // Seconds that the dispatcher alone takes for `repeats` calls of instruction 0, its first argument being the last
  // call's result: the floor that the engine is measured against (bench/engine.py).
  double time_direct_calls(std::uint32_t repeats);
  // Seconds that `num_threads` bare threads take if each runs an equal share of the instructions (which must be
  // independent and read kept slots only), from a common start to the last one's end.
  double time_static_split(std::uint32_t num_threads);

 private:
  // One argument as the call reads it: what to push on the stack.
  struct Load {
    enum class Kind : std::uint8_t { kConstant, kCopy, kMove, kTensors, kOptionalTensors } kind;
    std::uint32_t index;  // constants_, slots_ or lists_
  };
  struct ListItem {
    std::int32_t slot;
    bool move;
  };
  struct Instruction {
    std::optional<c10::OperatorHandle> op;  // none: a host function
    HostFunction function{};
    std::vector<Argument> arguments{};   // until seal()
    std::vector<std::int32_t> reads{};   // slots, single and sorted
    std::vector<std::int32_t> writes{};  // slots
    std::vector<Output> outputs{};
    std::uint32_t first_load = 0, last_load = 0;
    std::uint32_t first_release = 0, last_release = 0;
    std::int32_t only_output = -1;  // the slot, where there is one return value and it is stored
  };

  static void run_instruction(void* context, std::uint32_t instruction, std::uint32_t thread);
  void call_operator(Instruction& instruction, std::uint32_t index, std::uint32_t thread, torch::jit::Stack& stack);
  void call_in_memory(Instruction& instruction, std::uint32_t index, std::uint32_t thread, torch::jit::Stack& stack);
  void call_on_device(Instruction& instruction, std::uint32_t index, torch::jit::Stack& stack);
  bool as_observed(std::uint32_t index, const torch::jit::Stack& stack) const;
  void begin_memory(std::size_t num_threads);
  void end_memory(bool whole);
  void call_function(Instruction& instruction);
  void push_arguments(const Instruction& instruction, torch::jit::Stack& stack);
  void push_list(const Load& load, torch::jit::Stack& stack);
  void store(const Instruction& instruction, torch::jit::Stack& stack);
  void store_one(std::int32_t slot, c10::IValue value);
  void release_inputs(const Instruction& instruction);
  void empty_temporaries();
  std::int32_t checked_slot(std::int64_t slot) const;
  void check_outputs(const c10::OperatorHandle& op, const std::vector<Output>& outputs) const;
  void check_idle(const char* what) const;
  void check_measurable() const;
  // A pair of instructions that no path orders although both use a slot and one writes it: a data race on the slot.
  struct Conflict {
    std::uint32_t slot, writer, other;
  };
  std::optional<Conflict> find_conflict() const;
  void check_conflicts() const;
  void count_uses(std::vector<std::uint32_t>& producers);
  void lower(Instruction& instruction, const std::vector<std::uint32_t>& producers);
  void lower_argument(const Argument& argument, const c10::OperatorHandle* op, std::size_t position,
                      const std::function<bool(std::int32_t)>& moves);
  std::string name_of(std::uint32_t instruction) const;
  std::string describe_cycle(const std::vector<std::uint32_t>& cycle) const;

  Schedule schedule_;
  std::vector<Instruction> instructions_;
  std::vector<c10::IValue> slots_;
  std::vector<char> kept_;
  std::vector<Load> loads_;
  std::vector<c10::IValue> constants_;
  std::vector<std::vector<ListItem>> lists_;
  std::vector<std::int32_t> releases_;                    // slots to count down after a call
  std::vector<std::uint32_t> num_readers_;                // instructions that read a slot
  std::unique_ptr<std::atomic<std::uint32_t>[]> unread_;  // readers still to come in this run
  std::vector<torch::jit::Stack> stacks_;                 // one for each worker
  std::unique_ptr<Observation> observation_;
  std::unique_ptr<Placement> placement_;
  std::vector<std::optional<Layouts>> layouts_;  // by instruction: the arguments with which its takeover was observed
  bool in_memory_ = false;                       // the run in progress is observed or placed
  bool observed_ = false;
  std::shared_ptr<DevicePlan> devices_;  // null: results are where the processor puts them
  int intra_op_threads_ = 1;             // of the run in progress
  bool sealed_ = false;                  // a plan that seal() has refused never runs
  std::atomic<bool> running_{false};
};

}  // namespace penstock
