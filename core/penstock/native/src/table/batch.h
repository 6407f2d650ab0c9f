// Scratch of a call, kept between calls: a batch in the order of its shards, and a shard's part without repetition.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace penstock::table {

struct Batch {
  std::vector<uint64_t> keys;    // sorted by shard, within a shard in the batch's order
  std::vector<uint32_t> order;   // their positions in the batch
  std::vector<uint64_t> starts;  // of each shard, and the end
  std::vector<float*> rows;      // of `keys`, where a caller has found them

  // Sort keys[i] = key_of(ids[i]) by shard_of(key).  Throws std::invalid_argument for 2^31 ids and more.
  template <typename KeyOf, typename ShardOf>
  void sort(const int64_t* ids, uint64_t count, uint32_t num_shards, KeyOf key_of, ShardOf shard_of) {
    resize(count);
    starts.assign(num_shards + 1, 0);
    for (uint64_t i = 0; i < count; ++i) {
      unsorted_[i] = key_of(ids[i]);
      ++starts[shard_of(unsorted_[i]) + 1];
    }
    for (std::size_t s = 1; s < starts.size(); ++s) starts[s] += starts[s - 1];
    next_.assign(starts.begin(), starts.end() - 1);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t to = next_[shard_of(unsorted_[i])]++;
      keys[to] = unsorted_[i];
      order[to] = static_cast<uint32_t>(i);
    }
  }

 private:
  void resize(uint64_t count);
  std::vector<uint64_t> unsorted_, next_;
};

// The keys of one shard's part of a batch, each once, with their summed gradients.
class Merged {
 public:
  // Gradients of equal keys are summed in the order of the batch; `gradients` has to last as long as the sums.
  void merge(const Batch& batch, uint64_t begin, uint64_t end, const float* gradients, uint32_t width);

  uint64_t size() const { return size_; }
  uint64_t key(uint64_t number) const { return keys_[number]; }
  const float* gradient(uint64_t number) const {
    const uint32_t source = sources_[number];
    return (source & kSum) == 0 ? gradients_ + uint64_t{source} * width_
                                : sums_.data() + uint64_t{source & ~kSum} * width_;
  }

 private:
  static constexpr uint32_t kSum = 0x80000000;

  template <typename Slot>
  void find_equal(const Batch& batch, uint64_t begin, uint64_t end, std::vector<Slot>& slots);
  void add(uint64_t number, uint64_t position);

  const float* gradients_ = nullptr;
  uint64_t width_ = 0;
  uint64_t size_ = 0;
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> sources_;  // position of a key's only gradient in the batch, or of its sum in `sums_`, and kSum
  std::vector<float> sums_;
  std::vector<uint16_t> short_slots_;  // 1 + the number of the key, 0 where free
  std::vector<uint32_t> long_slots_;   // the same of parts that are too long for that
};

struct Scratch {
  Batch batch;
  Merged merged;
  std::vector<uint64_t> missing;
};

// As many as there are calls at a time.  Of a table, not of a thread: threads that come and go find memory mapped.
class Scratches {
 public:
  class Lent {
   public:
    Lent(Scratches& owner, std::unique_ptr<Scratch> scratch) : owner_(owner), scratch_(std::move(scratch)) {}
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    ~Lent() {
      const std::lock_guard guard(owner_.lock_);
      owner_.free_.push_back(std::move(scratch_));  // there is room: it was lent from there, or `lend` has made some
    }
    Scratch& operator*() const { return *scratch_; }
    Scratch* operator->() const { return scratch_.get(); }

   private:
    Scratches& owner_;
    std::unique_ptr<Scratch> scratch_;
  };

  Lent lend() {
    const std::lock_guard guard(lock_);
    if (free_.empty()) {
      free_.reserve(++made_);
      return {*this, std::make_unique<Scratch>()};
    }
    std::unique_ptr<Scratch> scratch = std::move(free_.back());
    free_.pop_back();
    return {*this, std::move(scratch)};
  }

 private:
  std::mutex lock_;
  std::vector<std::unique_ptr<Scratch>> free_;
  std::size_t made_ = 0;
};

}  // namespace penstock::table
