// The engine: a pool of workers that runs a schedule by ready counters, and traces every instruction.
//
// What an instruction does is behind a function pointer, so that this part knows no torch and runs under the
// sanitizers. The thread that calls run() is worker 0 (measured: it saves a hand-over and a wake-up each step).
//
// Invariants
//  * An instruction runs after all its predecessors, and sees what they wrote; once a run.
//  * At most `workers` non-host instructions run at once; a host instruction runs on a host thread and takes no
//    worker while it does.
//  * After the first failure nothing that has not started is executed, but the whole graph is still walked, so that
//    counters are whole again; run() returns that first failure and the engine can run again.
//  * One run at a time; a second one is refused. After fork, the child's copy refuses to run.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/clock.h"
#include "engine/host.h"
#include "engine/queue.h"
#include "engine/ring.h"
#include "engine/schedule.h"

namespace penstock {

// What runs an instruction. `thread` is below the number of workers for a worker, else a host thread. It may throw.
struct Kernel {
  void* context;
  void (*run)(void* context, std::uint32_t instruction, std::uint32_t thread);
};

// A kernel throws this to say more than what() holds: the inputs' shapes.
class KernelError : public std::runtime_error {
 public:
  KernelError(const std::string& message, std::string inputs_text)
      : std::runtime_error(message), inputs(std::move(inputs_text)) {}
  std::string inputs;
};

struct Failure {
  std::uint32_t instruction;
  std::string message;
  std::string inputs;
};

// The engine cannot run now: it is closed, busy, or another process's.
class EngineStateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Statistics {
  std::uint64_t runs = 0, failed_runs = 0, executed = 0, host_executed = 0, steals = 0, parks = 0, wakes = 0;
};

struct Trace {
  struct Row {
    std::int64_t start_ns;
    std::uint64_t step;
    std::uint32_t duration_ns;  // saturates at 4.29 s
    std::uint32_t op;
    std::uint16_t thread;
  };
  std::vector<Row> rows;  // by thread, then in order of completion
  std::uint64_t lost = 0;
};

class Engine {
 public:
  struct Options {
    std::uint32_t workers = 1;
    std::size_t ring_capacity = std::size_t{1} << 16;
    // Runs the body of a pool thread, with whatever the kernels need set up for that thread. Called on it.
    std::function<void(const std::function<void()>& body)> enter;
    // Asked every 50 ms by a caller that has nothing to do; true ends the run as a failure ("interrupted").
    std::function<bool()> interrupted;
  };

  explicit Engine(Options options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs every instruction of a sealed schedule once; returns the first failure, if any. `seed` other than 0 picks
  // at random among ready instructions and delays them at random: the same results must come out.
  std::optional<Failure> run(Schedule& schedule, Kernel kernel, std::uint64_t step, std::uint64_t seed);
  Trace drain();
  // Off, runs that start from now on are not recorded: for measuring what the trace costs.
  void set_tracing(bool on) noexcept { tracing_.store(on); }
  Statistics statistics() const;
  // Stops the pool; waits for a run in progress for at most `timeout`. Idempotent. A thread that is stuck in a host
  // instruction after that is left behind.
  void close(std::chrono::milliseconds timeout = std::chrono::milliseconds{5000});
  bool closed() const noexcept { return announced_.load(); }
  std::uint32_t workers() const noexcept { return static_cast<std::uint32_t>(workers_.size()); }

 private:
  struct alignas(64) Worker {
    explicit Worker(std::size_t ring_capacity) : ring(ring_capacity) {}
    ReadyQueue queue;
    alignas(64) std::atomic<std::uint32_t> state{0};  // kRunning, kParked, kNotified
    Ring ring;
    std::atomic<bool> searching{false};  // looks into its own queue all the time
    std::uint64_t random = 0;            // its own thread's
    std::atomic<std::uint64_t> steals{0}, parks{0}, wakes{0};
    std::thread thread;
  };

  void check_usable() const;
  void start(Schedule& schedule, Kernel kernel, std::uint64_t step, std::uint64_t seed);
  void run_in_order(Worker& me);
  void scatter_roots();
  void serve(std::uint32_t self);
  bool finished(std::uint32_t self) const noexcept;
  std::uint32_t find(std::uint32_t self);
  void start_searching(std::uint32_t self);
  bool stop_searching(std::uint32_t self);
  std::uint32_t take(std::uint32_t self, bool spares_searchers);
  std::uint32_t take_random(Worker& me);
  void work(std::uint32_t self, std::uint32_t instruction);
  void execute(Ring& ring, std::uint32_t thread, std::uint32_t instruction);
  std::uint32_t release_successors(std::uint32_t self, std::uint32_t instruction);
  void run_host(std::uint32_t instruction, std::uint32_t host_thread, Ring& ring);
  std::uint32_t home(std::uint32_t instruction, std::uint32_t otherwise) const noexcept;
  void dispatch(std::uint32_t target, std::uint32_t instruction);
  void retire(std::uint32_t count);
  void fail(std::uint32_t instruction, std::string message, std::string inputs);
  bool any_ready() const noexcept;
  void park(std::uint32_t self);
  void wait_parked(std::uint32_t self);
  void wake_one(std::uint32_t preferred);
  bool wake(std::uint32_t target);
  bool perturbed() const noexcept { return seed_.load(std::memory_order_relaxed) != 0; }
  std::uint64_t random(Worker& me) const noexcept;
  void perturb(Worker& me);

  const Options options_;
  const pid_t pid_;
  const std::uint64_t spin_ticks_;
  const std::uint64_t spare_searchers_ticks_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<HostPool> host_;

  // The run in progress; written by run() before the first push, constant until its last instruction is retired.
  Schedule* schedule_ = nullptr;
  Kernel kernel_{};
  std::uint64_t step_ = 0;
  bool traced_ = true;
  std::atomic<std::uint64_t> seed_{0};  // an idle worker looks at it at any time

  alignas(64) std::atomic<std::uint32_t> left_{0};  // instructions not yet retired
  alignas(64) std::atomic<std::uint32_t> num_parked_{0};
  std::atomic<std::uint32_t> num_searching_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> announced_{false};  // closed, and a step that was running has been notified
  std::atomic<bool> busy_{false};       // a run is in progress
  std::atomic<bool> tracing_{true};     // whether the next run is traced
  std::atomic<std::uint64_t> runs_{0}, failed_runs_{0};
  std::mutex closing_;
  std::mutex failure_lock_;
  std::optional<Failure> failure_;
  std::mutex drain_lock_;
  Clock clock_;
};

}  // namespace penstock
