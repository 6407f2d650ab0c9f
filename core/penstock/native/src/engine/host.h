// Threads for host instructions: those that wait (communication) or hold the interpreter lock. Torch-free.
//
// Invariant: an instruction never waits behind another that is blocked, up to `kMaxThreads` blocked ones; a thread is
// started when none is idle, and kept.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/ring.h"

namespace penstock {

class HostPool {
 public:
  using Run = std::function<void(std::uint32_t instruction, std::uint32_t host_thread, Ring& ring)>;
  using Enter = std::function<void(const std::function<void()>& body)>;
  static constexpr std::size_t kMaxThreads = 256;

  HostPool(Run run, Enter enter, std::size_t ring_capacity);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  void submit(std::uint32_t instruction);
  // Ends every thread that is idle or becomes idle within `timeout`; false if some were left running.
  bool stop(std::chrono::milliseconds timeout);
  // Visits the rings of all threads started so far.
  void each_ring(const std::function<void(std::uint32_t host_thread, Ring& ring)>& visit);

 private:
  struct State;
  static void serve(const std::shared_ptr<State>& state, std::uint32_t host_thread, Ring& ring);
  std::shared_ptr<State> state_;  // shared with threads that outlive the pool
};

}  // namespace penstock
