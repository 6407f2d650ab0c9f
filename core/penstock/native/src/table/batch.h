// Scratch of a thread, kept between calls: a batch in the order of its shards, and a shard's part without repetition.
#pragma once

#include <cstdint>
#include <vector>

namespace penstock::table {

struct Batch {
  std::vector<uint64_t> keys;    // sorted by shard, within a shard in the batch's order
  std::vector<uint32_t> order;   // their positions in the batch
  std::vector<uint64_t> starts;  // of each shard, and the end
  std::vector<float*> rows;      // of `keys`, where a caller has found them

  // Sort keys[i] = key_of(ids[i]) by shard_of(key).  Throws std::invalid_argument for 2^32 ids and more.
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
    return sum_of_[number] == kAlone ? gradients_ + uint64_t{firsts_[number]} * width_
                                     : sums_.data() + uint64_t{sum_of_[number]} * width_;
  }

 private:
  static constexpr uint32_t kAlone = 0xFFFFFFFF;

  void add(uint64_t number, uint64_t position);

  const float* gradients_ = nullptr;
  uint64_t width_ = 0;
  uint64_t size_ = 0;
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> firsts_;  // position in the batch of a key's first gradient
  std::vector<uint32_t> sum_of_;  // its sum in `sums_`, or kAlone: the first gradient is the only one
  std::vector<float> sums_;
  std::vector<uint32_t> slots_;  // 1 + the number of the key, 0 where free
};

}  // namespace penstock::table
