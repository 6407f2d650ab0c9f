#include "feed/rows.h"

#include <algorithm>

namespace penstock::feed {
namespace {

constexpr uint64_t kMostReserved = 1U << 16U;

}  // namespace

void Rows::reserve(const std::vector<Slot>& slots, uint64_t rows) {
  rows = std::min(rows, kMostReserved);  // a batch size of "all there is" asks for memory as rows come
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const uint64_t values = rows * (slots[i].width == 0 ? 1 : slots[i].width);
    if (slots[i].is_float) {
      columns[i].numbers.reserve(values);
    } else {
      columns[i].ids.reserve(values);
    }
    if (slots[i].width == 0) columns[i].lengths.reserve(rows);
  }
}

void Rows::cut(const std::vector<Slot>& slots, std::size_t slot) {
  for (std::size_t i = 0; i < slot; ++i) {
    Column& column = columns[i];
    uint64_t values = slots[i].width;
    if (values == 0) {
      values = static_cast<uint64_t>(column.lengths.data()[count]);
      column.lengths.cut(count);
    }
    if (slots[i].is_float) {
      column.numbers.cut(column.numbers.size() - values);
    } else {
      column.ids.cut(column.ids.size() - values);
    }
  }
}

void Rows::clear() {
  count = 0;
  for (Column& column : columns) {
    column.ids.cut(0);
    column.numbers.cut(0);
    column.lengths.cut(0);
  }
}

void Rows::append(const std::vector<Slot>& slots, const std::vector<Given>& given, std::vector<uint64_t>& starts,
                  uint64_t row) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Column& column = columns[i];
    uint64_t values = slots[i].width;
    if (values == 0) {
      values = static_cast<uint64_t>(given[i].lengths[row]);
      column.lengths.push(given[i].lengths[row]);
    }
    if (slots[i].is_float) {
      std::memcpy(column.numbers.room(values), given[i].numbers + starts[i], values * sizeof(float));
      column.numbers.commit(values);
    } else {
      std::memcpy(column.ids.room(values), given[i].ids + starts[i], values * sizeof(int64_t));
      column.ids.commit(values);
    }
    starts[i] += values;
  }
  ++count;
}

uint64_t Rows::bytes() const {
  uint64_t sum = 0;
  for (const Column& column : columns) sum += column.ids.bytes() + column.numbers.bytes() + column.lengths.bytes();
  return sum;
}

}  // namespace penstock::feed
