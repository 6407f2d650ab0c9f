// What an engine could at best achieve, for bench/engine.py: the same boxed calls with no scheduling, no tracing and
// no bookkeeping of slots.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "engine/threads.h"
#include "engine/torch_plan.h"

namespace penstock {
namespace {

using Steady = std::chrono::steady_clock;

double seconds(Steady::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

double TorchPlan::time_direct_calls(std::uint32_t repeats) {
  check_measurable();
  Instruction& instruction = instructions_[0];
  torch::jit::Stack arguments;
  push_arguments(instruction, arguments);
  const Load& first = loads_[instruction.first_load];
  if (first.kind == Load::Kind::kMove) slots_[first.index] = arguments[0];
  torch::jit::Stack stack;
  c10::IValue current = arguments[0];
  const auto begin = Steady::now();
  for (std::uint32_t i = 0; i < repeats; ++i) {
    stack.push_back(std::move(current));
    for (std::size_t k = 1; k < arguments.size(); ++k) stack.push_back(arguments[k]);
    instruction.op->callBoxed(&stack);
    current = std::move(stack.back());
    stack.clear();
  }
  return seconds(Steady::now() - begin);
}

double TorchPlan::time_static_split(std::uint32_t num_threads) {
  check_measurable();
  const std::uint32_t size = num_instructions();
  std::atomic<std::uint32_t> num_ready{0};
  std::atomic<bool> go{false};
  std::vector<Steady::time_point> ends(num_threads);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      with_operator_state(1, [&] {
        torch::jit::Stack stack;
        num_ready.fetch_add(1);
        while (!go.load(std::memory_order_acquire)) relax();
        for (std::uint32_t i = size * t / num_threads; i < size * (t + 1) / num_threads; ++i) {
          push_arguments(instructions_[i], stack);
          instructions_[i].op->callBoxed(&stack);
          stack.clear();
        }
        ends[t] = Steady::now();
      });
    });
  }
  while (num_ready.load() != num_threads) std::this_thread::yield();
  const auto begin = Steady::now();
  go.store(true, std::memory_order_release);
  // Asleep, as an idle core would be: a spinning caller would take a core from the threads that are measured.
  for (std::thread& thread : threads) thread.join();
  return seconds(*std::max_element(ends.begin(), ends.end()) - begin);
}

void TorchPlan::check_measurable() const {
  if (!sealed_ || num_instructions() == 0) throw std::invalid_argument("needs a sealed plan that is not empty");
  for (const Instruction& instruction : instructions_) {
    if (!instruction.op) throw std::invalid_argument("host functions cannot be measured without the engine");
  }
}

}  // namespace penstock
