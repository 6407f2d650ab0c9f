#include "ps/outbox.h"

#include <exception>
#include <utility>

namespace penstock::ps {

Outbox::~Outbox() {
  {
    const std::lock_guard guard(lock_);
    ends_ = true;
    for (const Waiting& one : waiting_) one.channel->break_off();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Outbox::send(std::shared_ptr<Channel> channel, Message message, std::vector<at::Tensor> kept, double limit_s) {
  {
    const std::lock_guard guard(lock_);
    waiting_.push_back({std::move(channel), std::move(message), std::move(kept), limit_s});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

bool Outbox::finish() {
  std::unique_lock held(lock_);
  changed_.wait(held, [this] { return waiting_.empty(); });
  return !std::exchange(failed_, false);
}

void Outbox::run() {
  std::unique_lock held(lock_);
  while (true) {
    changed_.wait(held, [this] { return ends_ || !waiting_.empty(); });
    if (ends_) return;
    Waiting& first = waiting_.front();  // stays where it is: only this thread takes it out
    held.unlock();
    bool well = true;
    try {
      first.channel->send(encode(first.message), bytes_of(first.message), now_s() + first.limit_s);
    } catch (const std::exception&) {
      well = false;
    }
    held.lock();
    if (well) {
      waiting_.pop_front();
    } else {
      failed_ = true;
      waiting_.clear();
    }
    if (waiting_.empty()) changed_.notify_all();
  }
}

}  // namespace penstock::ps
