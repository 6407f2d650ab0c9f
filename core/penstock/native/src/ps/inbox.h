// The answers of one step, taken off a channel while their receiver still computes and sends.
//
// A server sends values of blocks before the step's answer (Kind::kEarly). They have to be received meanwhile, or the
// connection's window closes: a thread does it, from `begin` until the answer itself is there or receiving fails. Its
// channel is received from by no other thread until `take` or `drop` has returned. No Python, no interpreter lock.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "ps/message.h"

namespace penstock::ps {

struct Answer {
  Message message;
  std::vector<Body> bodies;  // what the parts look at
};

class Inbox {
 public:
  Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  ~Inbox();

  // Once a step; nothing is open. `round`: of the step. No deadline: `break_off` of the channel ends it.
  void begin(std::shared_ptr<Channel> channel, std::int64_t round);

  bool is_open();

  // Waits for the answer, which has the early values that it names among its parts. Throws what receiving has thrown,
  // Malformed, or Unavailable after the deadline: then it stays open.
  Answer take(Deadline deadline);

  // After `break_off`: waits until nothing is received any more, and forgets it.
  void drop();

 private:
  struct Open {
    std::shared_ptr<Channel> channel;
    std::int64_t round = 0;
    std::vector<Answer> early;
    std::optional<Answer> last;
    std::exception_ptr failed;

    bool is_over() const { return last.has_value() || failed != nullptr; }
  };

  void run();

  std::mutex lock_;
  std::condition_variable changed_;
  std::optional<Open> open_;  // while it is not over, of the thread but for its being there
  bool ends_ = false;
  std::thread thread_;  // begun with the first step
};

}  // namespace penstock::ps
