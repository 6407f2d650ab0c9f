// Rows of a data set by columns, in memory that torch takes as it is.
//
// A dense slot has `width` values a row, one after the other.  A ragged one (width 0) has as many as its line gives;
// `lengths` says how many each row has.  Values are int64 or float32.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace penstock::feed {

// A growing array that does not initialise what it grows by: a batch is written once.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  uint64_t size() const { return size_; }
  uint64_t bytes() const { return capacity_ * sizeof(T); }
  void reserve(uint64_t wanted) {
    if (wanted > capacity_) grow(wanted);
  }
  // Return where the next `count` values go; `commit` says how many were written.
  T* room(uint64_t count) {
    if (size_ + count > capacity_) grow(size_ + count);
    return data_ + size_;
  }
  void commit(uint64_t count) { size_ += count; }
  void push(T value) {
    *room(1) = value;
    ++size_;
  }
  void cut(uint64_t size) { size_ = size; }

 private:
  void grow(uint64_t wanted) {
    const uint64_t larger = capacity_ + capacity_ / 2;
    const uint64_t next = wanted > larger ? wanted : larger;
    T* moved = static_cast<T*>(std::realloc(data_, next * sizeof(T)));
    if (moved == nullptr) throw std::bad_alloc();
    data_ = moved;
    capacity_ = next;
  }

  T* data_ = nullptr;
  uint64_t size_ = 0;
  uint64_t capacity_ = 0;
};

struct Slot {
  std::string name;
  bool is_float = false;
  uint32_t width = 0;  // values a row; 0: ragged
};

struct Column {
  Buffer<int64_t> ids;      // of a slot of int64
  Buffer<float> numbers;    // of one of float32
  Buffer<int64_t> lengths;  // of a ragged one
};

// Columns of another owner: of one of `ids` and `numbers` all rows' values, one after the other.
struct Given {
  const int64_t* ids = nullptr;
  const float* numbers = nullptr;
  const int64_t* lengths = nullptr;  // of a ragged slot
};

struct Rows {
  std::vector<Column> columns;
  uint64_t count = 0;

  Rows() = default;
  explicit Rows(std::size_t num_slots) : columns(num_slots) {}
  void reserve(const std::vector<Slot>& slots, uint64_t rows);
  // Take back a row of which only the slots before `slot` are there.
  void cut(const std::vector<Slot>& slots, std::size_t slot);
  void clear();  // keeps the memory

  // Append the row of `columns` (one for each slot) whose values begin at `starts`, and move `starts` behind them.
  void append(const std::vector<Slot>& slots, const std::vector<Given>& given, std::vector<uint64_t>& starts,
              uint64_t row);
  uint64_t bytes() const;
};

}  // namespace penstock::feed
