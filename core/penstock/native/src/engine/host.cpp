#include "engine/host.h"

#include <pthread.h>

#include <string>

namespace penstock {

struct HostPool::State {
  Run run;
  Enter enter;
  std::size_t ring_capacity;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable ended;
  std::deque<std::uint32_t> waiting;
  std::vector<std::unique_ptr<Ring>> rings;
  std::vector<std::thread> threads;
  std::size_t idle = 0;
  std::size_t alive = 0;
  bool stopping = false;
};

HostPool::HostPool(Run run, Enter enter, std::size_t ring_capacity) : state_(std::make_shared<State>()) {
  state_->run = std::move(run);
  state_->enter = std::move(enter);
  state_->ring_capacity = ring_capacity;
}

HostPool::~HostPool() {
  stop(std::chrono::milliseconds{0});
}

void HostPool::submit(std::uint32_t instruction) {
  const std::lock_guard guard(state_->mutex);
  state_->waiting.push_back(instruction);
  if (state_->idle >= state_->waiting.size() || state_->threads.size() >= kMaxThreads) {
    state_->work.notify_one();
    return;
  }
  const auto index = static_cast<std::uint32_t>(state_->threads.size());
  state_->rings.push_back(std::make_unique<Ring>(state_->ring_capacity));
  Ring& ring = *state_->rings.back();
  state_->threads.emplace_back([state = state_, index, &ring] {
    pthread_setname_np(pthread_self(), ("penstock-h" + std::to_string(index)).c_str());
    const auto body = [&state, index, &ring] { serve(state, index, ring); };
    if (state->enter)
      state->enter(body);
    else
      body();
    const std::lock_guard last(state->mutex);
    --state->alive;
    state->ended.notify_all();
  });
  ++state_->alive;
}

void HostPool::serve(const std::shared_ptr<State>& state, std::uint32_t host_thread, Ring& ring) {
  std::unique_lock lock(state->mutex);
  while (true) {
    ++state->idle;
    state->work.wait(lock, [&state] { return state->stopping || !state->waiting.empty(); });
    --state->idle;
    if (state->waiting.empty()) return;
    const std::uint32_t instruction = state->waiting.front();
    state->waiting.pop_front();
    lock.unlock();
    state->run(instruction, host_thread, ring);
    lock.lock();
  }
}

bool HostPool::stop(std::chrono::milliseconds timeout) {
  std::vector<std::thread> threads;
  bool all_ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->stopping = true;
    state_->work.notify_all();
    all_ended = state_->ended.wait_for(lock, timeout, [this] { return state_->alive == 0; });
    threads.swap(state_->threads);
  }
  for (std::thread& thread : threads) {
    if (all_ended)
      thread.join();
    else
      thread.detach();
  }
  return all_ended;
}

void HostPool::each_ring(const std::function<void(std::uint32_t, Ring&)>& visit) {
  const std::lock_guard guard(state_->mutex);
  for (std::size_t i = 0; i < state_->rings.size(); ++i) visit(static_cast<std::uint32_t>(i), *state_->rings[i]);
}

}  // namespace penstock
