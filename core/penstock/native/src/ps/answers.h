// A server's side of a channel. No interpreter lock: who calls from Python releases it.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/lookup.h"
#include "ps/channel.h"
#include "ps/errors.h"
#include "ps/message.h"
#include "ps/outbox.h"
#include "ps/request.h"
#include "ps/traffic.h"

namespace penstock::ps {

class Answers {
 public:
  Answers(std::shared_ptr<Channel> channel, std::shared_ptr<Traffic> traffic)
      : channel_(std::move(channel)), traffic_(std::move(traffic)) {}

  // `in_parts`: each message ahead of a step is returned too, as the request that the step will be.
  std::shared_ptr<Request> receive(bool in_parts) {
    if (open_ == nullptr) open_ = std::make_shared<Request>(traffic_->blocks());
    bool is_whole = false;
    do {
      is_whole = open_->take(channel_->receive(std::numeric_limits<double>::infinity()));
      work().add(Work::kReceive, lane_of(open_->message().trainer), channel_->begun_at_ns(), unix_now_ns());
    } while (!is_whole && !in_parts);
    if (!is_whole) return open_;
    trainer_ = open_->message().trainer;
    if (counts(trainer_)) traffic_->received(trainer_, open_->message());
    return std::exchange(open_, nullptr);
  }

  // From any thread, between the first message ahead of a step and its answer: the value of one block, which does not
  // change. Sent in the background, before the answer.
  void send_early(std::int64_t trainer, std::int64_t round, std::uint32_t block, const at::Tensor& value,
                  double limit_s) {
    const at::Tensor whole = value.contiguous().detach();  // without Python's object, which only its lock may free
    Message message{.kind = Kind::kEarly, .round = round};
    message.parts.push_back(described_as(block, whole.scalar_type(), whole.sizes().vec()));
    message.parts[0].data = static_cast<const char*>(whole.const_data_ptr());
    if (counts(trainer)) traffic_->sent(trainer, message);
    early_.send(channel_, std::move(message), {whole}, limit_s);
  }

  // Copies tensors to where the answer's body is taken from: they may change when this returns.
  void stage(const std::vector<std::uint32_t>& blocks, const std::vector<at::Tensor>& tensors) {
    answer_ = {};
    answer_began_ns_ = unix_now_ns();
    std::vector<at::Tensor> copies;  // until their bytes are taken
    copies.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = copies.emplace_back(tensors[i].contiguous());
      Part part = described_as(blocks.at(i), tensor.scalar_type(), tensor.sizes().vec());
      part.data = static_cast<const char*>(tensor.const_data_ptr());
      answer_.parts.push_back(std::move(part));
    }
    channel_->stage(bytes_of(answer_));
  }

  // The same for rows of a table [height, ...]: gathered straight into it. `ids` are checked.
  void stage_rows(std::uint32_t block, const at::Tensor& table, const at::Tensor& ids) {
    const Timed timed(work(), Work::kLookUp, block_lane(block));
    std::vector<std::int64_t> sizes = table.sizes().vec();
    sizes[0] = ids.numel();
    answer_ = {};
    answer_.parts.push_back(described_as(block, table.scalar_type(), std::move(sizes)));
    const Part& part = answer_.parts[0];
    const std::int64_t row_bytes = static_cast<std::int64_t>(part.num_bytes) / std::max<std::int64_t>(1, ids.numel());
    const ops::RowGather gather{static_cast<const char*>(table.const_data_ptr()), row_bytes, -1, row_bytes};
    ops::gather_rows(gather, ids.const_data_ptr<std::int64_t>(), channel_->room(part.num_bytes), 0, ids.numel());
  }

  // `early`: blocks whose values have been sent early, and hold.
  void answer(std::int64_t round, std::int64_t staleness, double deadline, std::vector<std::uint32_t> early) {
    answer_.kind = Kind::kAnswer;
    answer_.round = round;
    answer_.number = staleness;
    answer_.reads = std::move(early);
    traffic_->sent(trainer_, answer_);
    const std::int64_t began_ns = std::exchange(answer_began_ns_, 0);
    const std::int64_t begin_ns = began_ns != 0 ? began_ns : unix_now_ns();
    send(deadline);
    work().add(Work::kAnswer, lane_of(trainer_), begin_ns, unix_now_ns());
  }

  void refuse(const std::string& reason, bool rejoin, double deadline) {
    answer_ = {};
    answer_began_ns_ = 0;
    answer_.kind = Kind::kRefuse;
    answer_.number = rejoin ? 1 : 0;
    answer_.text = reason;
    channel_->stage({});
    send(deadline);
  }

  bool shares() const { return channel_->shares(); }
  void break_off() { channel_->break_off(); }
  void stop_receiving() { channel_->stop_receiving(); }
  std::string take_why() { return channel_->take_why(); }

 private:
  static Part described_as(std::uint32_t block, at::ScalarType dtype, std::vector<std::int64_t> sizes) {
    Part part;
    part.block = block;
    part.dtype = static_cast<std::int8_t>(dtype);
    part.sizes = std::move(sizes);
    part.num_bytes = c10::elementSize(dtype);
    for (const std::int64_t size : part.sizes) part.num_bytes *= static_cast<std::size_t>(size);
    return part;
  }

  void send(double deadline) {
    if (!early_.finish()) throw Unavailable("values before an answer could not be sent");
    channel_->send_staged(encode(answer_), deadline);
    answer_ = {};
  }

  static constexpr std::int64_t kMaxTrainers = std::int64_t{1} << 20;  // that are counted

  WorkLog& work() { return traffic_->work(); }

  static bool counts(std::int64_t trainer) { return trainer >= 0 && trainer < kMaxTrainers; }

  std::shared_ptr<Channel> channel_;
  Outbox early_;
  std::shared_ptr<Traffic> traffic_;
  std::shared_ptr<Request> open_;  // of which messages ahead have come
  std::int64_t trainer_ = -1;      // who sent the request that is being answered
  Message answer_;
  std::int64_t answer_began_ns_ = 0;  // 0: nothing is staged
};

}  // namespace penstock::ps
