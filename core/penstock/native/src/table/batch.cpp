#include "table/batch.h"

#include <algorithm>
#include <stdexcept>

namespace penstock::table {

void Batch::resize(uint64_t count) {
  if (count > 0x7FFFFFFF) throw std::invalid_argument("a batch has at most 2^31 - 1 ids");
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
    sources_.resize(end - begin);
  }
  sums_.clear();
  if (end - begin <= 0xFFFF) {
    find_equal(batch, begin, end, short_slots_);
  } else {
    find_equal(batch, begin, end, long_slots_);
  }
}

// Slots are short and many: whether the first one looked at is free is then nearly always predicted.
template <typename Slot>
void Merged::find_equal(const Batch& batch, uint64_t begin, uint64_t end, std::vector<Slot>& slots) {
  uint64_t num_slots = 64;
  while (num_slots < 4 * (end - begin)) num_slots *= 2;
  slots.assign(num_slots, 0);
  const uint64_t mask = num_slots - 1;
  uint64_t size = 0;
  for (uint64_t i = begin; i < end; ++i) {
    const uint64_t key = batch.keys[i];
    uint64_t slot = key & mask;  // a key's low bits are as random as its high ones
    while (slots[slot] != 0 && keys_[slots[slot] - 1] != key) [[unlikely]]
      slot = (slot + 1) & mask;
    if (slots[slot] != 0) [[unlikely]] {
      add(slots[slot] - 1, batch.order[i]);
      continue;
    }
    keys_[size] = key;
    sources_[size] = batch.order[i];
    slots[slot] = static_cast<Slot>(++size);
  }
  size_ = size;
}

void Merged::add(uint64_t number, uint64_t position) {
  if ((sources_[number] & kSum) == 0) {
    const float* first = gradients_ + uint64_t{sources_[number]} * width_;
    sources_[number] = kSum | static_cast<uint32_t>(sums_.size() / width_);
    sums_.insert(sums_.end(), first, first + width_);
  }
  float* sum = sums_.data() + uint64_t{sources_[number] & ~kSum} * width_;
  const float* more = gradients_ + position * width_;
  for (uint64_t k = 0; k < width_; ++k) sum[k] += more[k];
}

}  // namespace penstock::table
