#include "ps/message.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/copy_row.h"
#include "ps/errors.h"

namespace penstock::ps {
namespace {

struct Fixed {
  std::uint16_t kind, num_parts, num_reads, zero;
  std::int64_t trainer, epoch, round, number;
  std::uint64_t body;
};
static_assert(sizeof(Fixed) == 48);

struct Described {
  std::uint64_t offset;
  std::uint32_t block;
  std::uint8_t role;
  std::int8_t dtype;
  std::uint8_t num_dims;
  std::uint8_t zero;
};
static_assert(sizeof(Described) == 16);

constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 40;

template <typename T>
void put(std::string& to, const T* from, std::size_t count) {
  to.append(reinterpret_cast<const char*>(from), count * sizeof(T));
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  void take(T* to, std::size_t count) {
    const std::size_t size = count * sizeof(T);
    if (size > bytes_.size() - at_) throw Malformed("the head of a message ends too early");
    if (size != 0) std::memcpy(to, bytes_.data() + at_, size);
    at_ += size;
  }

  std::string_view rest() const { return bytes_.substr(at_); }

 private:
  std::string_view bytes_;
  std::size_t at_ = 0;
};

bool travels(c10::ScalarType type) {
  static constexpr std::array kTypes{c10::ScalarType::Double,   c10::ScalarType::Float, c10::ScalarType::Half,
                                     c10::ScalarType::BFloat16, c10::ScalarType::Long,  c10::ScalarType::Int,
                                     c10::ScalarType::Short,    c10::ScalarType::Char,  c10::ScalarType::Byte,
                                     c10::ScalarType::Bool};
  return std::find(kTypes.begin(), kTypes.end(), type) != kTypes.end();
}

std::uint64_t bytes_of_tensor(const Part& part) {
  const auto type = static_cast<c10::ScalarType>(part.dtype);
  if (!travels(type)) throw Malformed("a tensor of a message has a dtype that does not travel");
  unsigned __int128 size = c10::elementSize(type);
  for (const std::int64_t length : part.sizes) {
    const bool fits = length >= 0 && static_cast<std::uint64_t>(length) <= kMaxSize;
    size *= fits ? static_cast<std::uint64_t>(length) : 0;
    if (!fits || size > kMaxSize) throw Malformed("a tensor of a message has an impossible size");
  }
  return static_cast<std::uint64_t>(size);
}

Part part_of(Reader& reader, const Body& body, std::size_t& end) {
  Described described{};
  reader.take(&described, 1);
  Part part;
  if (described.role > 1 || described.num_dims > kMaxDims) throw Malformed("a tensor of a message is misdescribed");
  part.block = described.block;
  part.role = static_cast<Role>(described.role);
  part.dtype = described.dtype;
  part.sizes.resize(described.num_dims);
  reader.take(part.sizes.data(), part.sizes.size());
  part.num_bytes = bytes_of_tensor(part);
  if (described.offset != aligned(end) || described.offset > body.length ||
      part.num_bytes > body.length - described.offset) {
    throw Malformed("a tensor of a message is not where its body has it");
  }
  part.data = body.data + described.offset;
  end = described.offset + part.num_bytes;
  return part;
}

}  // namespace

std::string why_not(std::size_t num_dims) {
  if (num_dims <= kMaxDims) return {};
  return "a tensor has " + std::to_string(num_dims) + " dimensions, of at most " + std::to_string(kMaxDims);
}

std::string why_not(const Message& message) {
  if (message.parts.size() > kMaxCount || message.reads.size() > kMaxCount) {
    return "a message has " + std::to_string(message.parts.size()) + " tensors and reads " +
           std::to_string(message.reads.size()) + " blocks, of at most " + std::to_string(kMaxCount) + " each";
  }
  for (const Part& part : message.parts) {
    if (std::string why = why_not(part.sizes.size()); !why.empty()) return why;
  }
  return {};
}

std::string encode(const Message& message) {
  if (const std::string why = why_not(message); !why.empty()) throw Malformed(why);
  std::string head;
  head.reserve(sizeof(Fixed) + message.parts.size() * 48 + message.reads.size() * 4 + message.text.size());
  Fixed fixed{static_cast<std::uint16_t>(message.kind),
              static_cast<std::uint16_t>(message.parts.size()),
              static_cast<std::uint16_t>(message.reads.size()),
              0,
              message.trainer,
              message.epoch,
              message.round,
              message.number,
              0};
  put(head, &fixed, 1);
  std::size_t end = 0;
  for (const Part& part : message.parts) {
    end = aligned(end);
    const Described described{
        end, part.block, static_cast<std::uint8_t>(part.role), part.dtype, static_cast<std::uint8_t>(part.sizes.size()),
        0};
    put(head, &described, 1);
    put(head, part.sizes.data(), part.sizes.size());
    end += part.num_bytes;
  }
  fixed.body = end;
  std::memcpy(head.data(), &fixed, sizeof fixed);
  put(head, message.reads.data(), message.reads.size());
  head += message.text;
  return head;
}

Message decode(std::string_view head, const Body& body) {
  Reader reader(head);
  Fixed fixed{};
  reader.take(&fixed, 1);
  if (fixed.body != body.length) throw Malformed("the body of a message has another length than its head says");
  Message out;
  out.kind = static_cast<Kind>(fixed.kind);
  out.trainer = fixed.trainer;
  out.epoch = fixed.epoch;
  out.round = fixed.round;
  out.number = fixed.number;
  std::size_t end = 0;
  for (std::size_t i = 0; i < fixed.num_parts; ++i) out.parts.push_back(part_of(reader, body, end));
  if (end != body.length) throw Malformed("the body of a message is longer than its tensors");
  out.reads.resize(fixed.num_reads);
  reader.take(out.reads.data(), out.reads.size());
  out.text = reader.rest();
  return out;
}

std::size_t size_of_body(const Message& message) {
  std::size_t end = 0;
  for (const Part& part : message.parts) end = aligned(end) + part.num_bytes;
  return end;
}

void write_runs(const std::vector<Runs>& runs, char* to) {
  for (const Runs& one : runs) {
    if (one.stride == one.bytes || one.count == 1) {
      std::memcpy(to, one.data, one.count * one.bytes);
    } else {
      for (std::size_t i = 0; i < one.count; ++i) {
        ops::copy_row(to + i * one.bytes, one.data + i * one.stride, static_cast<std::int64_t>(one.bytes));
      }
    }
    to += one.count * one.bytes;
  }
}

void write_body(const Message& message, char* to) {
  std::size_t end = 0;
  for (const Part& part : message.parts) {
    end = aligned(end);
    if (!part.runs.empty()) {
      write_runs(part.runs, to + end);
    } else if (part.num_bytes != 0) {
      std::memcpy(to + end, part.data, part.num_bytes);
    }
    end += part.num_bytes;
  }
}

std::vector<iovec> bytes_of(const Message& message) {
  std::vector<iovec> out;
  out.reserve(message.parts.size());
  for (const Part& part : message.parts) out.push_back({const_cast<char*>(part.data), part.num_bytes});
  return out;
}

}  // namespace penstock::ps
