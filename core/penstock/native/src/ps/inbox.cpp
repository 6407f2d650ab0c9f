#include "ps/inbox.h"

#include <chrono>
#include <limits>
#include <utility>

#include "ps/errors.h"

namespace penstock::ps {
namespace {

Answer received_from(Channel& channel) {
  Received received = channel.receive(std::numeric_limits<double>::infinity());
  Answer out{decode(received.head, received.body), {}};
  out.bodies.push_back(std::move(received.body));
  return out;
}

// Moves the early value of a block of this round to the answer that names it: the newest, as it came last.
void add_early(Answer& answer, std::vector<Answer>& early, std::uint32_t block, std::int64_t round) {
  for (auto one = early.rbegin(); one != early.rend(); ++one) {
    if (one->message.round != round || one->message.parts.empty() || one->message.parts[0].block != block) continue;
    answer.message.parts.push_back(std::move(one->message.parts[0]));
    answer.bodies.push_back(std::move(one->bodies[0]));
    one->message.parts.clear();
    return;
  }
  throw Malformed("an answer names a value that was not sent before it");
}

}  // namespace

Inbox::~Inbox() {
  {
    const std::lock_guard guard(lock_);
    ends_ = true;
    if (open_) open_->channel->break_off();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Inbox::begin(std::shared_ptr<Channel> channel, std::int64_t round) {
  {
    const std::lock_guard guard(lock_);
    open_.emplace();
    open_->channel = std::move(channel);
    open_->round = round;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

bool Inbox::is_open() {
  const std::lock_guard guard(lock_);
  return open_.has_value();
}

Answer Inbox::take(Deadline deadline) {
  std::unique_lock held(lock_);
  const std::chrono::duration<double> left(deadline - now_s());
  if (!changed_.wait_for(held, left, [this] { return open_->is_over(); })) {
    throw Unavailable("the other side did not answer within the deadline");
  }
  Open done = *std::exchange(open_, std::nullopt);
  held.unlock();
  if (done.failed != nullptr) std::rethrow_exception(done.failed);
  for (const std::uint32_t block : done.last->message.reads) add_early(*done.last, done.early, block, done.round);
  return *std::move(done.last);
}

void Inbox::drop() {
  std::unique_lock held(lock_);
  if (!open_) return;
  changed_.wait(held, [this] { return open_->is_over(); });
  open_.reset();
}

void Inbox::run() {
  std::unique_lock held(lock_);
  while (true) {
    changed_.wait(held, [this] { return ends_ || (open_ && !open_->is_over()); });
    if (ends_) return;
    const std::shared_ptr<Channel> channel = open_->channel;
    held.unlock();
    std::optional<Answer> answer;
    std::exception_ptr failed;
    try {
      answer = received_from(*channel);
    } catch (const std::exception&) {
      failed = std::current_exception();
    }
    held.lock();
    if (failed != nullptr) {
      open_->failed = failed;
    } else if (answer->message.kind == Kind::kEarly) {
      open_->early.push_back(*std::move(answer));
      continue;  // `take` waits for the answer
    } else {
      open_->last = std::move(answer);
    }
    changed_.notify_all();
  }
}

}  // namespace penstock::ps
