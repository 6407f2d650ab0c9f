// Messages to one server that leave while their sender computes: a thread sends them in order, over one channel.
//
// Tensors that a message looks at are held until it has left. After a failure what still waits is dropped, and `finish`
// says so: the channel is of no use then, since a message may have left in part. No Python, no interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ps/message.h"

namespace penstock::ps {

class Outbox {
 public:
  Outbox() = default;
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  ~Outbox();

  // Nothing else is sent over the channel before `finish` has returned. `limit_s`: for this message to leave.
  void send(std::shared_ptr<Channel> channel, Message message, std::vector<at::Tensor> kept, double limit_s);

  // Waits until nothing is being sent. False: something since the last call has not been.
  bool finish();

 private:
  struct Waiting {
    std::shared_ptr<Channel> channel;
    Message message;
    std::vector<at::Tensor> kept;
    double limit_s;
  };

  void run();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;  // the first is being sent
  bool failed_ = false, ends_ = false;
  std::thread thread_;  // begun with the first message
};

}  // namespace penstock::ps
