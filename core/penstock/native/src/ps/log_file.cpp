#include "ps/log_file.h"

#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "ps/crc32.h"

namespace penstock::ps {
namespace {

#pragma pack(push, 1)
struct Prefix {
  char magic[4];
  std::uint64_t body_length;
  std::uint32_t head_length, checksum;
  std::uint64_t sequence;
};
#pragma pack(pop)
static_assert(sizeof(Prefix) == 28);

constexpr std::size_t kAlignment = 64, kMaxHead = std::size_t{1} << 20, kMaxParts = 512;  // IOV_MAX is 1024
constexpr char kZeros[kAlignment] = {};

[[noreturn]] void fail() {
  throw std::system_error(errno, std::generic_category());
}

void write_all(int descriptor, std::vector<iovec> parts) {
  std::size_t first = 0;
  while (first < parts.size()) {
    const auto count = static_cast<int>(std::min(parts.size() - first, kMaxParts));
    const ssize_t written = ::writev(descriptor, &parts[first], count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail();
    auto left = static_cast<std::size_t>(written);
    while (first < parts.size() && left >= parts[first].iov_len) left -= parts[first++].iov_len;
    if (left > 0) {
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + left;
      parts[first].iov_len -= left;
    }
  }
}

iovec part_of(std::string_view view) {
  return {const_cast<char*>(view.data()), view.size()};
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// The head of a message and its body, as penstock.ps.wire.encode makes them.
class Builder {
 public:
  Builder(const std::string& kind, const std::string& fields)
      : text_("{\"kind\": \"" + kind + "\", \"fields\": {" + fields + "}, \"tensors\": [") {}

  void add(const std::string& name, const std::string& dtype, const at::Tensor& tensor) {
    const std::size_t padding = (kAlignment - offset_ % kAlignment) % kAlignment;
    if (padding > 0) record_.body.emplace_back(kZeros, padding);
    offset_ += padding;
    text_ += std::string(num_++ > 0 ? ", " : "") + "[" + name + ", " + dtype + ", [";
    for (std::int64_t i = 0; i < tensor.dim(); ++i) text_ += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
    text_ += "], " + std::to_string(offset_) + "]";
    if (!tensor.is_contiguous()) throw std::invalid_argument("a gradient is not contiguous");
    record_.body.push_back(bytes_of(tensor));
    offset_ += tensor.nbytes();
  }

  Record finish() {
    text_ += "], \"body\": " + std::to_string(offset_) + "}";
    if (text_.size() + 8 > kMaxHead) throw std::length_error("a record's head is too large");
    const auto size = static_cast<std::uint32_t>(text_.size());
    record_.head.assign("PSW1");
    record_.head.append(reinterpret_cast<const char*>(&size), sizeof size);
    record_.head += text_;
    return std::move(record_);
  }

 private:
  std::string text_;
  Record record_;
  std::size_t offset_ = 0;
  int num_ = 0;
};

const std::string kRows = "\"rows\"", kValues = "\"values\"", kInt64 = "\"int64\"";

}  // namespace

void LogFile::open(int descriptor) {
  struct stat found{};
  if (::fstat(descriptor, &found) != 0) fail();
  const std::lock_guard guard(lock_);
  const int before = descriptor_.exchange(descriptor);
  if (before >= 0) ::close(before);
  is_torn_ = false;
  size_ = found.st_size;
  next_before_ = -1;
}

void LogFile::close() {
  const std::lock_guard guard(lock_);
  const int before = descriptor_.exchange(-1);
  if (before >= 0) ::close(before);
}

std::int64_t LogFile::append(const std::vector<Record>& records) {
  const std::lock_guard guard(lock_);
  const std::int64_t first = next_;
  std::int64_t size = size_;
  if (is_torn_) throw std::system_error(EIO, std::generic_category());
  if (descriptor_ >= 0) {
    std::vector<Prefix> prefixes(records.size());
    std::vector<iovec> parts;
    for (std::size_t i = 0; i < records.size(); ++i) {
      const auto& [head, body] = records[i];
      std::uint32_t checksum = crc32(0, head.data(), head.size());
      std::uint64_t length = 0;
      parts.push_back({&prefixes[i], sizeof(Prefix)});
      parts.push_back(part_of(head));
      for (const std::string_view part : body) {
        checksum = crc32(checksum, part.data(), part.size());
        length += part.size();
        if (!part.empty()) parts.push_back(part_of(part));
      }
      const auto number = static_cast<std::uint64_t>(first) + i;
      prefixes[i] = {{'P', 'S', 'J', '2'}, length, static_cast<std::uint32_t>(head.size()), checksum, number};
      size += static_cast<std::int64_t>(sizeof(Prefix) + head.size() + length);
    }
    try {
      write_all(descriptor_, std::move(parts));
    } catch (const std::system_error&) {
      if (::ftruncate(descriptor_, size_) != 0) is_torn_ = true;
      throw;
    }
  }
  size_before_ = size_.exchange(size);
  next_before_ = first;
  next_ += static_cast<std::int64_t>(records.size());
  return first;
}

void LogFile::take_back() {
  const std::lock_guard guard(lock_);
  if (next_before_ < 0) throw std::logic_error("there is nothing to take back");
  truncate(size_before_);
  next_ = std::exchange(next_before_, -1);
}

void LogFile::cut(std::int64_t size, std::int64_t next) {
  const std::lock_guard guard(lock_);
  truncate(size);
  next_ = next;
  next_before_ = -1;
}

void LogFile::truncate(std::int64_t size) {
  if (descriptor_ >= 0 && ::ftruncate(descriptor_, size) != 0) fail();
  size_ = size;
}

Record round_record(std::int64_t round, const std::vector<Gradient>& merged, const std::vector<BlockWords>& words) {
  Builder out("round", "\"round\": " + std::to_string(round));
  for (const auto& [block, values, rows] : merged) {
    out.add(words[block].values, words[block].dtype, values);
    if (rows) out.add(words[block].rows, kInt64, *rows);
  }
  return out.finish();
}

Record applied_record(std::int64_t trainer, std::int64_t epoch, std::int64_t round, const Gradient& push,
                      const std::vector<BlockWords>& words) {
  const auto& [block, values, rows] = push;
  Builder out("applied", "\"trainer\": " + std::to_string(trainer) + ", \"epoch\": " + std::to_string(epoch) +
                             ", \"round\": " + std::to_string(round) + ", \"block\": " + words[block].name);
  if (rows) out.add(kRows, kInt64, *rows);
  out.add(kValues, words[block].dtype, values);
  return out.finish();
}

}  // namespace penstock::ps
