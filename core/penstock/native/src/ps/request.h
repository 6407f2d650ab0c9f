// A request as a server's handler takes it: decoded, and checked against the server's blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/lookup.h"
#include "ps/channel.h"
#include "ps/errors.h"
#include "ps/message.h"

namespace penstock::ps {

// What a server's block looks like. A table has no height: any id is a row of it.
struct Block {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  bool is_table;
};

using Gradient = std::tuple<std::uint32_t, at::Tensor, std::optional<at::Tensor>>;  // block, values, rows

inline std::string described(const Part& part) {
  std::string out = std::string(c10::toString(static_cast<at::ScalarType>(part.dtype))) + "[";
  for (std::size_t i = 0; i < part.sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(part.sizes[i]);
  return out + "]";
}

// A request as a server's handler takes it. Its tensors look at the channel's memory until the next one is received.
class Request {
 public:
  explicit Request(std::shared_ptr<const std::vector<Block>> blocks) : blocks_(std::move(blocks)) {}

  // False: more belongs to the request. What was sent ahead of a step is put before the rest of it.
  bool take(Received received) {
    Message next = decode(received.head, received.body);
    kept_->push_back(std::move(received.body.keep));
    const bool is_same = next.trainer == message_.trainer && next.epoch == message_.epoch;
    if (next.kind == Kind::kAhead) {
      if (num_ahead_++ > 0 && !is_same) throw Malformed("what was sent ahead of a step is not of one trainer");
      if (next.parts.empty()) throw Malformed("nothing was sent ahead of a step");
      check_reads(next);
      newest_ = message_.parts.size();
      std::vector<Part> parts = std::exchange(message_.parts, {});
      std::swap(parts, next.parts);
      message_ = std::move(next);
      for (Part& part : parts) add_ahead(std::move(part));
      return false;
    }
    if (num_ahead_ != (next.kind == Kind::kStep ? next.number : 0) || (num_ahead_ > 0 && !is_same)) {
      throw Malformed("a step follows other messages than were sent ahead of it");
    }
    next.parts.insert(next.parts.begin(), std::move_iterator(message_.parts.begin()),
                      std::move_iterator(message_.parts.end()));
    message_ = std::move(next);
    return true;
  }

  const Message& message() const { return message_; }
  std::int64_t num_ahead() const { return num_ahead_; }  // messages that came before it

  // Rows are copied before they are checked, since their sender could still change them.
  std::vector<Gradient> gradients() const {
    std::vector<Gradient> out;
    const auto& parts = message_.parts;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Block& block = block_of(parts[i]);
      std::optional<at::Tensor> rows;
      if (parts[i].role == Role::kRows) {
        rows = checked_rows(parts[i], block);
        if (++i == parts.size() || parts[i].role != Role::kValues || parts[i].block != parts[i - 1].block) {
          throw Malformed("rows of '" + block.name + "' come without their values");
        }
      }
      for (const Gradient& before : out) {
        if (std::get<0>(before) == parts[i].block) throw Malformed("'" + block.name + "' is pushed twice in a step");
      }
      check_values(parts[i], block, rows);
      out.emplace_back(parts[i].block, tensor_of(parts[i]), std::move(rows));
    }
    return out;
  }

  std::pair<std::uint32_t, at::Tensor> ids() const {
    if (message_.parts.size() != 1 || message_.parts[0].role != Role::kRows) {
      throw Malformed("a lookup has one tensor, the ids");
    }
    return {message_.parts[0].block, checked_rows(message_.parts[0], block_of(message_.parts[0]))};
  }

  // Of kAhead: what the newest message has brought, which `gradients` will have too.
  std::vector<Gradient> newest() const {
    std::vector<Gradient> out;
    for (std::size_t i = newest_; i < message_.parts.size(); ++i) {
      out.emplace_back(message_.parts[i].block, tensor_of(message_.parts[i]), std::nullopt);
    }
    return out;
  }

  std::vector<std::uint32_t> reads() const {
    check_reads(message_);
    return message_.reads;
  }

 private:
  // Each block once: what is answered is then not more than all blocks, whatever the request is.
  void check_reads(const Message& message) const {
    std::vector<bool> is_read(blocks_->size());
    for (const std::uint32_t block : message.reads) {
      if (block >= blocks_->size() || (*blocks_)[block].is_table)
        throw Malformed("a step reads what is no block with values");
      if (is_read[block]) throw Malformed("a step reads '" + (*blocks_)[block].name + "' twice");
      is_read[block] = true;
    }
  }

  // At most one gradient of each block, so that what waits for a step is not more than the blocks.
  void add_ahead(Part part) {
    const Block& block = block_of(part);
    if (part.role != Role::kValues) throw Malformed("rows of '" + block.name + "' were sent ahead of a step");
    check_values(part, block, std::nullopt);
    for (const Part& before : message_.parts) {
      if (before.block == part.block) throw Malformed("'" + block.name + "' is pushed twice in a step");
    }
    message_.parts.push_back(std::move(part));
  }

  const Block& block_of(const Part& part) const {
    if (part.block >= blocks_->size())
      throw Malformed("block " + std::to_string(part.block) + " is not on this server");
    return (*blocks_)[part.block];
  }

  at::Tensor tensor_of(const Part& part) const {
    return at::from_blob(
        const_cast<char*>(part.data), part.sizes, [kept = kept_](void*) {},
        at::TensorOptions().dtype(static_cast<at::ScalarType>(part.dtype)));
  }

  at::Tensor checked_rows(const Part& part, const Block& block) const {
    if (static_cast<at::ScalarType>(part.dtype) != at::kLong || part.sizes.size() != 1 || block.sizes.empty()) {
      throw Malformed("rows of '" + block.name + "' are int64 [n] of a block with rows, not " + described(part));
    }
    at::Tensor rows = at::empty(part.sizes, at::kLong);
    auto* to = rows.mutable_data_ptr<std::int64_t>();
    std::memcpy(to, part.data, part.num_bytes);
    const std::int64_t bad = block.is_table ? -1 : ops::first_outside(to, rows.numel(), block.sizes[0]);
    if (bad >= 0) {
      throw Malformed("row " + std::to_string(to[bad]) + " of '" + block.name + "', which has " +
                      std::to_string(block.sizes[0]));
    }
    return rows;
  }

  void check_values(const Part& part, const Block& block, const std::optional<at::Tensor>& rows) const {
    std::vector<std::int64_t> expected = block.sizes;
    if (rows) expected[0] = rows->numel();
    const bool fits = rows || !block.is_table;
    if (!fits || static_cast<at::ScalarType>(part.dtype) != block.dtype || part.sizes != expected) {
      throw Malformed("a push of '" + block.name + "' has the values " + described(part) +
                      ", which do not fit the block" + (fits ? "" : ": a push of a table has rows and values"));
    }
  }

  std::shared_ptr<std::vector<std::shared_ptr<void>>> kept_ = std::make_shared<std::vector<std::shared_ptr<void>>>();
  std::shared_ptr<const std::vector<Block>> blocks_;
  Message message_;
  std::int64_t num_ahead_ = 0;
  std::size_t newest_ = 0;  // the first part of the newest message
};

}  // namespace penstock::ps
