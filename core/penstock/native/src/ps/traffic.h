// What went over a server's channels, by trainer and block.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ps/message.h"
#include "ps/request.h"
#include "ps/waits.h"
#include "ps/work_log.h"

namespace penstock::ps {

// The blocks of a server by their numbers, what went over its channels, by trainer and block, and when it was worked
// on. Thread-safe.
class Traffic {
 public:
  explicit Traffic(std::vector<Block> blocks) : blocks_(std::make_shared<std::vector<Block>>(std::move(blocks))) {}

  const std::shared_ptr<const std::vector<Block>>& blocks() const { return blocks_; }
  WorkLog& work() { return work_; }

  void received(std::int64_t trainer, const Message& message) {
    add(trainer, message, [](Sums& sums, const Part& part) {
      sums.calls += part.role == Role::kValues ? 1 : 0;
      sums.received_bytes += static_cast<std::int64_t>(part.num_bytes);
    });
  }
  void sent(std::int64_t trainer, const Message& message) {
    add(trainer, message, [](Sums& sums, const Part& part) {
      sums.calls += 1;
      sums.sent_bytes += static_cast<std::int64_t>(part.num_bytes);
    });
  }
  // A gradient of each block was merged with those of others.
  void merged(std::int64_t trainer, const std::vector<std::uint32_t>& blocks) {
    const std::lock_guard guard(lock_);
    for (const std::uint32_t block : blocks) row(trainer, block).merges += 1;
  }
  // A push was so many updates of others behind.
  void stale(std::int64_t trainer, std::uint32_t block, std::int64_t staleness) {
    const std::lock_guard guard(lock_);
    row(trainer, block).staleness += staleness;
  }
  std::map<std::int64_t, std::vector<Sums>> sums() {
    const std::lock_guard guard(lock_);
    return sums_;
  }

 private:
  Sums& row(std::int64_t trainer, std::uint32_t block) {
    std::vector<Sums>& sums = sums_[trainer];
    sums.resize(blocks_->size());
    return sums[block];
  }

  template <typename Count>
  void add(std::int64_t trainer, const Message& message, Count count) {
    const std::lock_guard guard(lock_);
    std::vector<Sums>& sums = sums_[trainer];
    sums.resize(blocks_->size());
    for (const Part& part : message.parts) {
      if (part.block < blocks_->size()) count(sums[part.block], part);
    }
  }

  const std::shared_ptr<const std::vector<Block>> blocks_;
  std::mutex lock_;
  std::map<std::int64_t, std::vector<Sums>> sums_;
  WorkLog work_;
};

}  // namespace penstock::ps
