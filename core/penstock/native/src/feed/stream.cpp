#include "feed/stream.h"

#include <limits>

namespace penstock::feed {

void Stream::begin() {
  if (batch_ != nullptr) return;
  began_ns_ = reads_.begin();
  batch_ = std::make_shared<Batch>(pool_);
  batch_->rows = pool_->take();
  if (batch_->rows.columns.empty()) {
    batch_->rows = Rows(parser_.slots().size());
    batch_->rows.reserve(parser_.slots(), batch_size_);
  }
  batch_->producer = producer_;
}

bool Stream::give() {
  if (batch_->rows.count != 0) reads_.end(began_ns_);  // the wait for room in the queue is none of it
  batch_->number = next_number_++;
  stopped_ = !queue_->push(std::move(batch_));
  batch_ = nullptr;
  return !stopped_;
}

bool Stream::emit(const Place& place) {
  batch_->marks.push_back({file_, place, false});
  if (!give()) return false;
  begin();
  return true;
}

std::optional<Fault> Stream::read(int descriptor, uint32_t file, Place place) {
  begin();
  file_ = file;
  place_ = place;
  return parser_.read(descriptor, place_, std::numeric_limits<uint64_t>::max(), *this);
}

std::optional<Fault> Stream::read_rest() {
  begin();
  std::optional<Fault> fault = parser_.read_rest(place_, *this);
  if (!fault && !stopped_) end(file_, place_);
  return fault;
}

void Stream::end(uint32_t file, Place place) {
  begin();
  batch_->marks.push_back({file, place, true});
}

void Stream::extend(const std::vector<Given>& given, uint64_t count, uint32_t file, Place place) {
  begin();
  file_ = file;
  std::vector<uint64_t> starts(given.size(), 0);
  for (uint64_t row = 0; row < count; ++row) {
    batch_->rows.append(parser_.slots(), given, starts, row);
    ++place.offset;
    ++place.lines;
    if (!appended(place)) return;
  }
}

void Stream::finish() {
  if (batch_ != nullptr && !stopped_ && (batch_->rows.count != 0 || !batch_->marks.empty())) give();
}

}  // namespace penstock::feed
