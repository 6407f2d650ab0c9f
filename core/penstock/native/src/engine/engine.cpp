#include "engine/engine.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

namespace penstock {
namespace {

enum State : std::uint32_t { kRunning = 0, kParked = 1, kNotified = 2 };

// Longer than a hand-over between threads, shorter than what a wake-up costs in a virtual machine.
constexpr std::uint64_t kSpinMicroseconds = 20;
// For so long an instruction queued for a worker that spins is left to it; after that the worker may have been
// preempted.
constexpr std::uint64_t kSpareSearchersMicroseconds = 2;
constexpr long kInterruptPollNs = 50'000'000;
constexpr std::size_t kHostRingCapacity = 4096;

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, const timespec* timeout) noexcept {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, timeout, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

std::uint64_t mix(std::uint64_t x) noexcept {  // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void count(std::atomic<std::uint64_t>& counter) noexcept {  // one writer: no locked instruction needed
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace

Engine::Engine(Options options)
    : options_(std::move(options)),
      pid_(getpid()),
      spin_ticks_(kSpinMicroseconds * ticks_per_microsecond()),
      spare_searchers_ticks_(kSpareSearchersMicroseconds * ticks_per_microsecond()) {
  const std::uint32_t num_workers = std::max<std::uint32_t>(1, options_.workers);
  for (std::uint32_t i = 0; i < num_workers; ++i) workers_.push_back(std::make_unique<Worker>(options_.ring_capacity));
  host_ = std::make_unique<HostPool>(
      [this](std::uint32_t instruction, std::uint32_t thread, Ring& ring) { run_host(instruction, thread, ring); },
      options_.enter, std::min(options_.ring_capacity, kHostRingCapacity));
  for (std::uint32_t i = 1; i < num_workers; ++i) {
    workers_[i]->thread = std::thread([this, i] {
      pthread_setname_np(pthread_self(), ("penstock-" + std::to_string(i)).c_str());
      if (options_.enter)
        options_.enter([this, i] { serve(i); });
      else
        serve(i);
    });
  }
}

Engine::~Engine() {
  if (getpid() != pid_) {
    // A forked child has the objects but not the threads: joining would hang, destroying would terminate.
    for (auto& worker : workers_) static_cast<void>(worker.release());
    static_cast<void>(host_.release());
    return;
  }
  close();
}

void Engine::check_usable() const {
  if (getpid() != pid_) {
    throw EngineStateError("the engine was made in process " + std::to_string(pid_) +
                           " and has no threads in its fork " + std::to_string(getpid()) +
                           "; make a new one after the fork");
  }
  if (closed_.load()) throw EngineStateError("the engine is closed");
}

std::optional<Failure> Engine::run(Schedule& schedule, Kernel kernel, std::uint64_t step, std::uint64_t seed) {
  check_usable();
  if (!schedule.sealed()) throw EngineStateError("the plan is not sealed");
  if (busy_.exchange(true)) {
    throw EngineStateError("the engine is running a step for another thread; one engine runs one step at a time");
  }
  if (closed_.load()) {  // close() looks at busy_ after it has set closed_: one of the two sees the other
    busy_.store(false);
    throw EngineStateError("the engine is closed");
  }
  start(schedule, kernel, step, seed);
  if (workers_.size() == 1 && seed == 0 && !schedule.has_host()) {
    run_in_order(*workers_[0]);  // nothing to decide: the order is known since seal()
  } else {
    scatter_roots();
    serve(0);
  }
  count(runs_);
  std::optional<Failure> failure;
  if (failed_.load()) {
    const std::lock_guard guard(failure_lock_);
    failure = std::exchange(failure_, std::nullopt);
    failed_.store(false);
    count(failed_runs_);
  }
  busy_.store(false);
  return failure;
}

void Engine::start(Schedule& schedule, Kernel kernel, std::uint64_t step, std::uint64_t seed) {
  schedule_ = &schedule;
  kernel_ = kernel;
  step_ = step;
  traced_ = tracing_.load();
  seed_.store(seed, std::memory_order_relaxed);
  for (const auto& worker : workers_) worker->queue.reserve(schedule.size());
  workers_[0]->random = 0;  // this thread's; with one worker a seed gives the same order every time
  left_.store(schedule.size(), std::memory_order_seq_cst);
}

void Engine::run_in_order(Worker& me) {
  for (const std::uint32_t instruction : schedule_->order()) {
    if (failed_.load(std::memory_order_relaxed)) return;
    execute(me.ring, 0, instruction);
  }
}

void Engine::scatter_roots() {
  const std::vector<std::uint32_t>& roots = schedule_->roots();
  const auto num_workers = static_cast<std::uint32_t>(workers_.size());
  // Contiguous blocks: instructions that were added together work on the same replica's tensors. From the last to
  // the first, because a worker takes from the back of its queue.
  for (std::size_t i = roots.size(); i-- > 0;) {
    if (schedule_->node(roots[i]).on_host) continue;
    workers_[home(roots[i], static_cast<std::uint32_t>(i * num_workers / roots.size()))]->queue.push(roots[i]);
  }
  for (std::uint32_t i = 1; i < num_workers; ++i) {
    if (workers_[i]->queue.size() != 0) wake(i);
  }
  if (!schedule_->has_host()) return;
  for (const std::uint32_t root : roots) {
    if (schedule_->node(root).on_host) host_->submit(root);
  }
}

bool Engine::finished(std::uint32_t self) const noexcept {
  return self == 0 ? left_.load(std::memory_order_seq_cst) == 0 : stopping_.load(std::memory_order_seq_cst);
}

void Engine::serve(std::uint32_t self) {
  for (std::uint32_t instruction = find(self); instruction != kNone; instruction = find(self)) work(self, instruction);
}

// Waits for an instruction; kNone when the run (worker 0) or the engine (the others) has ended.
std::uint32_t Engine::find(std::uint32_t self) {
  while (true) {
    start_searching(self);
    const std::uint64_t since = ticks();
    std::uint64_t waited = 0;
    do {
      const std::uint32_t instruction =
          perturbed() ? take_random(*workers_[self]) : take(self, waited < spare_searchers_ticks_);
      if (instruction != kNone) {
        if (stop_searching(self) && any_ready()) wake_one(self);
        return instruction;
      }
      if (finished(self)) {
        stop_searching(self);
        return kNone;
      }
      relax();
      waited = ticks() - since;
    } while (waited < spin_ticks_);
    stop_searching(self);
    park(self);
  }
}

// While a worker searches, a push wakes none. So the last to stop searching must look after what was pushed
// meanwhile: by waking another if it leaves with an instruction, by looking once more (in park) if it leaves to park.
void Engine::start_searching(std::uint32_t self) {
  workers_[self]->searching.store(true, std::memory_order_relaxed);
  num_searching_.fetch_add(1, std::memory_order_seq_cst);
}

bool Engine::stop_searching(std::uint32_t self) {
  workers_[self]->searching.store(false, std::memory_order_relaxed);
  return num_searching_.fetch_sub(1, std::memory_order_seq_cst) == 1;
}

// Takes from this worker's queue, else from another's. With `spares_searchers` not from one that searches as well: it
// was given an instruction that is at home there and is about to see it.
std::uint32_t Engine::take(std::uint32_t self, bool spares_searchers) {
  Worker& me = *workers_[self];
  std::uint32_t instruction = me.queue.pop_back();
  if (instruction != kNone) return instruction;
  for (std::size_t i = 1, victim = self; i < workers_.size(); ++i) {
    victim = victim + 1 == workers_.size() ? 0 : victim + 1;
    Worker& other = *workers_[victim];
    if (spares_searchers && other.searching.load(std::memory_order_relaxed)) continue;
    instruction = other.queue.pop_front();
    if (instruction != kNone) {
      count(me.steals);
      return instruction;
    }
  }
  return kNone;
}

std::uint32_t Engine::take_random(Worker& me) {
  const std::size_t first = random(me) % workers_.size();
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    ReadyQueue& queue = workers_[(first + i) % workers_.size()]->queue;
    const std::uint32_t instruction = queue.pop_any(random(me));
    if (instruction != kNone) return instruction;
  }
  return kNone;
}

// Runs `instruction` and what becomes ready behind it, until this worker has nothing left.
void Engine::work(std::uint32_t self, std::uint32_t instruction) {
  Worker& me = *workers_[self];
  std::uint32_t num_finished = 0;
  while (instruction != kNone) {
    if (perturbed()) perturb(me);
    execute(me.ring, self, instruction);
    ++num_finished;
    instruction = release_successors(self, instruction);
    if (instruction == kNone) instruction = perturbed() ? take_random(me) : me.queue.pop_back();
  }
  // Counted once for all: the shared counter's cache line travels only when a worker runs dry.
  retire(num_finished);
}

void Engine::execute(Ring& ring, std::uint32_t thread, std::uint32_t instruction) {
  if (failed_.load(std::memory_order_relaxed)) return;
  const bool traced = traced_;
  const std::uint64_t begin = traced ? ticks() : 0;
  try {
    kernel_.run(kernel_.context, instruction, thread);
  } catch (const KernelError& error) {
    fail(instruction, error.what(), error.inputs);
  } catch (const std::exception& error) {
    fail(instruction, error.what(), {});
  } catch (...) {
    fail(instruction, "an exception of an unknown type", {});
  }
  if (traced) ring.write(schedule_->node(instruction).op, step_, begin, ticks());
}

// Counts `instruction` as finished for its successors. Of those that are ready now and at home here the first is
// returned, to be continued with; the others are queued. A host thread passes kNone as `self`.
std::uint32_t Engine::release_successors(std::uint32_t self, std::uint32_t instruction) {
  const Schedule::Node& node = schedule_->node(instruction);
  const std::uint32_t* successors = schedule_->successors();
  std::uint32_t next = kNone;
  for (std::uint32_t k = node.last_successor; k-- > node.first_successor;) {
    const std::uint32_t successor = successors[k];
    if (!schedule_->arrive(successor)) continue;
    const std::uint32_t target = home(successor, self == kNone ? successor % workers() : self);
    if (target != self || perturbed() || schedule_->node(successor).on_host) {
      dispatch(target, successor);
      continue;
    }
    if (next != kNone) dispatch(self, next);
    next = successor;
  }
  return next;
}

void Engine::run_host(std::uint32_t instruction, std::uint32_t host_thread, Ring& ring) {
  execute(ring, workers() + host_thread, instruction);
  release_successors(kNone, instruction);
  retire(1);
}

std::uint32_t Engine::home(std::uint32_t instruction, std::uint32_t otherwise) const noexcept {
  const std::int32_t affinity = schedule_->node(instruction).affinity;
  return affinity < 0 ? otherwise : static_cast<std::uint32_t>(affinity) % workers();
}

void Engine::dispatch(std::uint32_t target, std::uint32_t instruction) {
  if (schedule_->node(instruction).on_host) {
    host_->submit(instruction);
    return;
  }
  workers_[target]->queue.push(instruction);
  wake_one(target);
}

void Engine::retire(std::uint32_t num_finished) {
  if (left_.fetch_sub(num_finished, std::memory_order_seq_cst) == num_finished) wake(0);
}

void Engine::fail(std::uint32_t instruction, std::string message, std::string inputs) {
  const std::lock_guard guard(failure_lock_);
  if (failed_.load(std::memory_order_relaxed)) return;
  failure_ = Failure{instruction, std::move(message), std::move(inputs)};
  failed_.store(true, std::memory_order_release);
}

bool Engine::any_ready() const noexcept {
  for (const auto& worker : workers_) {
    if (worker->queue.size() != 0) return true;
  }
  return false;
}

void Engine::park(std::uint32_t self) {
  Worker& me = *workers_[self];
  me.state.store(kParked, std::memory_order_seq_cst);
  num_parked_.fetch_add(1, std::memory_order_seq_cst);
  // A worker that pushes, retires or stops does so before it looks for parked ones; so either it sees this one, or
  // this one sees what it did.
  if (!any_ready() && !finished(self)) wait_parked(self);
  std::uint32_t expected = kParked;
  if (me.state.compare_exchange_strong(expected, kRunning))
    num_parked_.fetch_sub(1, std::memory_order_seq_cst);
  else
    me.state.store(kRunning, std::memory_order_relaxed);  // a waker has taken it off the count already
}

void Engine::wait_parked(std::uint32_t self) {
  Worker& me = *workers_[self];
  count(me.parks);
  const bool polls = self == 0 && options_.interrupted != nullptr;
  const timespec poll{0, kInterruptPollNs};
  while (me.state.load(std::memory_order_acquire) == kParked) {
    futex_wait(me.state, kParked, polls ? &poll : nullptr);
    if (polls && !failed_.load() && me.state.load() == kParked && options_.interrupted())
      fail(kNone, "interrupted", {});
  }
}

void Engine::wake_one(std::uint32_t preferred) {
  if (num_searching_.load(std::memory_order_seq_cst) != 0) return;
  if (num_parked_.load(std::memory_order_seq_cst) == 0) return;
  if (wake(preferred)) return;
  for (std::uint32_t i = 0; i < workers_.size(); ++i) {
    if (wake(i)) return;
  }
}

bool Engine::wake(std::uint32_t target) {
  Worker& worker = *workers_[target];
  std::uint32_t expected = kParked;
  if (worker.state.load(std::memory_order_seq_cst) != kParked) return false;
  if (!worker.state.compare_exchange_strong(expected, kNotified)) return false;
  num_parked_.fetch_sub(1, std::memory_order_seq_cst);
  worker.wakes.fetch_add(1, std::memory_order_relaxed);
  futex_wake(worker.state);
  return true;
}

std::uint64_t Engine::random(Worker& me) const noexcept {
  return mix(mix(me.random += 0x9e3779b97f4a7c15u) ^ seed_.load(std::memory_order_relaxed));
}

void Engine::perturb(Worker& me) {
  const std::uint64_t dice = random(me);
  if (dice % 4 == 0) std::this_thread::yield();
  if (dice % 4 == 1) {
    const std::uint64_t until = ticks() + (dice >> 8) % (5 * ticks_per_microsecond());
    while (ticks() < until) relax();
  }
  if (dice % 64 == 2) std::this_thread::sleep_for(std::chrono::microseconds{20});
}

Trace Engine::drain() {
  const std::lock_guard guard(drain_lock_);
  std::vector<Event> events;
  std::vector<std::size_t> ends;
  Trace trace;
  for (auto& worker : workers_) {
    trace.lost += worker->ring.drain(events);
    ends.push_back(events.size());
  }
  host_->each_ring([&](std::uint32_t, Ring& ring) {
    trace.lost += ring.drain(events);
    ends.push_back(events.size());
  });
  const Timeline line = clock_.timeline();
  trace.rows.reserve(events.size());
  for (std::size_t thread = 0, i = 0; thread < ends.size(); ++thread) {
    for (; i < ends[thread]; ++i) {
      const Event& event = events[i];
      const std::uint64_t duration = std::min<std::uint64_t>(line.duration_ns(event.begin, event.end), UINT32_MAX);
      trace.rows.push_back({line.unix_ns(event.begin), event.step, static_cast<std::uint32_t>(duration),
                            static_cast<std::uint32_t>(event.op), static_cast<std::uint16_t>(thread)});
    }
  }
  return trace;
}

Statistics Engine::statistics() const {
  Statistics sum;
  sum.runs = runs_.load();
  sum.failed_runs = failed_runs_.load();
  for (const auto& worker : workers_) {
    sum.executed += worker->ring.written();
    sum.steals += worker->steals.load();
    sum.parks += worker->parks.load();
    sum.wakes += worker->wakes.load();
  }
  host_->each_ring([&](std::uint32_t, Ring& ring) { sum.host_executed += ring.written(); });
  return sum;
}

void Engine::close(std::chrono::milliseconds timeout) {
  if (getpid() != pid_) return;
  const std::lock_guard guard(closing_);
  if (closed_.exchange(true)) return;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  if (busy_.load()) fail(kNone, "the engine was closed during the step", {});
  announced_.store(true);
  while (busy_.load() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
  const bool idle = !busy_.load();
  stopping_.store(true, std::memory_order_seq_cst);
  for (std::uint32_t i = 1; i < workers_.size(); ++i) {
    wake(i);
    if (idle)
      workers_[i]->thread.join();
    else
      workers_[i]->thread.detach();
  }
  host_->stop(idle ? timeout : std::chrono::milliseconds{0});
}

}  // namespace penstock
