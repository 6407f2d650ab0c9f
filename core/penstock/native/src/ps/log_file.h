// The open file of a server's write-ahead log, to which Python and native code append records: their format is that of
// penstock.ps.durability.wal, which reads them, and decides when a file begins and ends.
//
// a record   is a prefix (magic, lengths of body and head, CRC-32 of head and body, sequence number), a head and a
// body,
//            as penstock.ps.wire has messages
// appending  writes all records of a call or none: if it fails, the file is as before
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ps/request.h"

namespace penstock::ps {

// What one record holds. `body`: views of memory that stays until it is written.
struct Record {
  std::string head;
  std::vector<std::string_view> body;
};

// Thread-safe. Without a file records are counted only. Throws std::system_error.
class LogFile {
 public:
  explicit LogFile(std::int64_t next) : next_(next) {}
  ~LogFile() { close(); }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  void open(int descriptor);  // from now on it is written to, and owned; the one before is closed
  void close();
  bool is_kept() const { return descriptor_ >= 0; }
  std::int64_t next() const { return next_; }  // number of the record that comes next
  std::int64_t size() const { return size_; }  // bytes of the file
  // Returns the number of the first.
  std::int64_t append(const std::vector<Record>& records);
  void take_back();                                // what the last call of `append` wrote, if nothing came after it
  void cut(std::int64_t size, std::int64_t next);  // the file ends there, and goes on with that number

 private:
  void truncate(std::int64_t size);

  std::mutex lock_;  // held while records are written, so what is only looked at has no need of it
  std::atomic<int> descriptor_ = -1;
  bool is_torn_ = false;  // part of a record is in the file, and cannot be taken out: nothing may come after it
  std::atomic<std::int64_t> next_, size_ = 0;        // of records, and bytes of the file
  std::int64_t size_before_ = 0, next_before_ = -1;  // before the last call of `append`
};

// A block's words in heads, as JSON: its tensors' names in a record of several blocks, its own name, its dtype.
struct BlockWords {
  std::string values, rows, name, dtype;
};

// A closed round with its merged gradients.
Record round_record(std::int64_t round, const std::vector<Gradient>& merged, const std::vector<BlockWords>& words);
// A push of one block that was applied.
Record applied_record(std::int64_t trainer, std::int64_t epoch, std::int64_t round, const Gradient& push,
                      const std::vector<BlockWords>& words);

}  // namespace penstock::ps
