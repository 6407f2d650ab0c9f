// One producer of batches: it reads files one after the other and puts batches into a queue.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "feed/parser.h"
#include "feed/queue.h"

namespace penstock::feed {

// How far a file has come once the batch that carries the mark is used.
struct Mark {
  uint32_t file = 0;
  Place place;
  bool ended = false;
};

// The memory of released batches, for those to come: fresh memory costs a page fault for each 4 KiB,
// which is a third of the time that parsing takes.
class Pool {
 public:
  explicit Pool(std::size_t most) : most_(most) {}

  // No columns: there is none.
  Rows take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return Rows();
    Rows rows = std::move(free_.back());
    free_.pop_back();
    return rows;
  }
  void give(Rows rows) {
    rows.clear();
    const std::lock_guard lock(mutex_);
    if (free_.size() < most_) free_.push_back(std::move(rows));
  }

 private:
  const std::size_t most_;
  std::mutex mutex_;
  std::vector<Rows> free_;
};

struct Batch {
  Batch() = default;
  explicit Batch(std::shared_ptr<Pool> from) : pool(std::move(from)) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  ~Batch() {
    if (pool != nullptr) pool->give(std::move(rows));
  }

  Rows rows;
  uint32_t producer = 0;
  uint64_t number = 0;  // from 0, of this producer
  std::vector<Mark> marks;
  std::shared_ptr<Pool> pool;
};

using Batches = Queue<std::shared_ptr<Batch>>;

// When batches were read, once tracing is on: Unix nanoseconds of begin and end, the newest `kMost`.  One thread adds,
// another takes.
class Reads {
 public:
  struct Read {
    int64_t begin_ns, end_ns;
  };

  void trace() { traces_.store(true, std::memory_order_relaxed); }
  // When a batch begins; 0: tracing is off.
  int64_t begin() const { return traces_.load(std::memory_order_relaxed) ? now_ns() : 0; }
  // A batch that began at `begin_ns` is whole now.
  void end(int64_t begin_ns) {
    if (begin_ns == 0) return;
    const Read read{begin_ns, now_ns()};
    const std::lock_guard lock(mutex_);
    if (reads_.size() == kMost) reads_.erase(reads_.begin());
    reads_.push_back(read);
  }
  std::vector<Read> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(reads_, {});
  }

 private:
  static constexpr std::size_t kMost = 1024;
  static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  std::atomic<bool> traces_{false};
  std::mutex mutex_;
  std::vector<Read> reads_;
};

// Every row of a file is in one batch, in the order of the lines; a batch goes on with the next file.  The marks of the
// batches up to some number say exactly which lines these hold.  One thread at a time.
class Stream {
 public:
  Stream(uint32_t producer, std::vector<Slot> slots, uint64_t batch_size, bool skips_bad_lines,
         std::shared_ptr<Batches> queue)
      : parser_(std::move(slots), skips_bad_lines),
        producer_(producer),
        batch_size_(batch_size),
        queue_(std::move(queue)),
        pool_(std::make_shared<Pool>(kPooled)) {}

  // Read to the last line end of the stream, of which `place` is the first line that is read.  The queue is stopped:
  // `stopped()`.
  std::optional<Fault> read(int descriptor, uint32_t file, Place place);
  // Read what stands behind the last line end, if anything does, and say that all of the file was read.
  std::optional<Fault> read_rest();
  // Take `count` rows of `file` that are columns already; `place` is that of the first, counted in rows.
  void extend(const std::vector<Given>& given, uint64_t count, uint32_t file, Place place);
  // Say that all of `file` was taken.
  void end(uint32_t file, Place place);
  // Give out the rows of the last batch, and the marks that no batch has carried yet.
  void finish();

  Parser& parser() { return parser_; }
  Reads& reads() { return reads_; }
  bool stopped() const { return stopped_; }

  Rows& rows() { return batch_->rows; }
  bool appended(const Place& place) { return batch_->rows.count < batch_size_ || emit(place); }

 private:
  static constexpr std::size_t kPooled = 8;

  void begin();
  bool emit(const Place& place);
  bool give();

  Parser parser_;
  const uint32_t producer_;
  const uint64_t batch_size_;
  std::shared_ptr<Batches> queue_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<Batch> batch_;
  uint32_t file_ = 0;
  Place place_;  // in the file
  uint64_t next_number_ = 0;
  Reads reads_;
  int64_t began_ns_ = 0;  // of `batch_`
  bool stopped_ = false;
};

}  // namespace penstock::feed
