// Messages of a channel: what a trainer asks about the tensors of a step, and the answers.
//
// A head is a fixed part, a description for each tensor, the numbers of the blocks to read, and text. Blocks have the
// numbers that the server has given them when the channel was opened. Nothing that a head claims is believed before
// `decode` has checked it against the head's and the body's length.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ps/channel.h"

namespace penstock::ps {

enum class Kind : std::uint16_t {
  kLookUp = 1,   // [ids] of a block or table; round: what has to be applied before
  kAhead = 2,    // gradients of the step that follows on the connection, which is answered for both, and `reads` of
                 // which the values may be sent early; sync: its round, else 0
  kStep = 3,     // gradients, and `reads` when they are applied; sync: the round's barrier; number: of kAhead before it
  kAnswer = 16,  // reads: blocks whose values were sent early, and hold
  kRefuse = 17,  // text: the reason; number: whether to join again
  kEarly = 18,   // of one block: its values once `round` (of kAhead) or, without rounds, the step is applied, if the
                 // answer that follows says that they hold
};

enum class Role : std::uint8_t { kValues, kRows };

constexpr std::size_t kMaxDims = 8, kMaxCount = 65535;  // of a tensor; of a message's tensors, and of its reads

// `count` runs of `bytes`, the first at `data`, each `stride` bytes after the one before.
struct Runs {
  const char* data;
  std::size_t count, bytes, stride;
};

// A tensor of a message. Its bytes are at `data`, or, in one that is only written, where `runs` say, one after another.
struct Part {
  std::uint32_t block = 0;
  Role role = Role::kValues;
  std::int8_t dtype = 0;  // c10::ScalarType
  std::vector<std::int64_t> sizes;
  const char* data = nullptr;
  std::size_t num_bytes = 0;
  std::vector<Runs> runs;
};

struct Message {
  Kind kind = Kind::kAnswer;
  std::int64_t trainer = 0, epoch = 0, round = 0, number = 0;
  std::vector<Part> parts;
  std::vector<std::uint32_t> reads;
  std::string text;
};

// Why a tensor of so many dimensions, or a message, has no encoding; empty: it has one.
std::string why_not(std::size_t num_dims);
std::string why_not(const Message& message);

// The head; the body is the parts' bytes, each at a multiple of kAlignment. Throws Malformed for `why_not`.
std::string encode(const Message& message);

// Parts look at `body`. Throws Malformed.
Message decode(std::string_view head, const Body& body);

// Of parts without runs.
std::vector<iovec> bytes_of(const Message& message);

std::size_t size_of_body(const Message& message);
void write_body(const Message& message, char* to);
void write_runs(const std::vector<Runs>& runs, char* to);

}  // namespace penstock::ps
