#include "table/batch.h"

#include <algorithm>
#include <stdexcept>

namespace penstock::table {

void Batch::resize(uint64_t count) {
  if (count > 0xFFFFFFFF) throw std::invalid_argument("a batch has at most 2^32 - 1 ids");
  unsorted_.resize(count);
  keys.resize(count);
  order.resize(count);
  rows.resize(count);
}

void Merged::merge(const Batch& batch, uint64_t begin, uint64_t end, const float* gradients, uint32_t width) {
  gradients_ = gradients;
  width_ = width;
  size_ = 0;
  if (keys_.size() < end - begin) {
    keys_.resize(end - begin);
    firsts_.resize(end - begin);
    sum_of_.resize(end - begin);
  }
  sums_.clear();
  uint64_t num_slots = 64;
  while (num_slots < 2 * (end - begin)) num_slots *= 2;
  slots_.assign(num_slots, 0);
  const uint64_t mask = num_slots - 1;
  for (uint64_t i = begin; i < end; ++i) {
    const uint64_t key = batch.keys[i];
    uint64_t slot = key & mask;  // a key's low bits are as random as its high ones
    while (slots_[slot] != 0 && keys_[slots_[slot] - 1] != key) slot = (slot + 1) & mask;
    if (slots_[slot] != 0) {
      add(slots_[slot] - 1, batch.order[i]);
      continue;
    }
    keys_[size_] = key;
    firsts_[size_] = batch.order[i];
    sum_of_[size_] = kAlone;
    slots_[slot] = static_cast<uint32_t>(++size_);
  }
}

void Merged::add(uint64_t number, uint64_t position) {
  if (sum_of_[number] == kAlone) {
    sum_of_[number] = static_cast<uint32_t>(sums_.size() / width_);
    const float* first = gradients_ + uint64_t{firsts_[number]} * width_;
    sums_.insert(sums_.end(), first, first + width_);
  }
  float* sum = sums_.data() + uint64_t{sum_of_[number]} * width_;
  const float* more = gradients_ + position * width_;
  for (uint64_t k = 0; k < width_; ++k) sum[k] += more[k];
}

}  // namespace penstock::table
