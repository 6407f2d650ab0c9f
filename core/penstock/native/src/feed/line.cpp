#include "feed/line.h"

#include <string_view>

#include "feed/numbers.h"

namespace penstock::feed {
namespace {

constexpr std::size_t kShown = 40;  // bytes of a value in a message

inline bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\r';
}

// One space and a value behind it is what nearly every value has before it.  A branch, not arithmetic: the processor
// then reads on before it has seen the byte.
inline const char* skip_blanks(const char* p) {
  if (p[0] == ' ' && static_cast<unsigned char>(p[1]) > ' ') [[likely]]
    return p + 1;
  while (is_blank(*p)) ++p;
  return p;
}

// What a message shows of text that may hold anything.
std::string shown(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= ' ' && byte < 0x7F) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return out + (text.size() > kShown ? "…'" : "'");
}

std::string token_at(const char* p) {
  const char* end = token_end(p);
  return shown({p, static_cast<std::size_t>(end == p ? 1 : end - p)});
}

const char* kind_of(const Slot& slot) {
  return slot.is_float ? "a finite number of float32" : "a whole number of 64 bits";
}

struct Failed {
  const char* at;
  std::string reason;
};

[[gnu::cold]] Failed no_count(const char* p, const std::vector<Slot>& slots, std::size_t slot) {
  const std::string which =
      "slot '" + slots[slot].name + "' (" + std::to_string(slot + 1) + " of " + std::to_string(slots.size()) + ")";
  if (*p == '\n') return {p, slot == 0 ? "the line is empty" : "the line ends before " + which};
  return {p, "the number of values of " + which + " is " + token_at(p) + "; expected a whole number of at least 1"};
}

[[gnu::cold]] Failed bad_count(const char* p, const Slot& slot, uint64_t count) {
  if (count == 0) {
    return {p, "slot '" + slot.name +
                   "' has no values: the number of ids can not be zero, pad it in the data generator (with a 0, say)"};
  }
  return {p, "slot '" + slot.name + "' announces " + std::to_string(count) + " values, but its variable has " +
                 std::to_string(slot.width) + " a row"};
}

[[gnu::cold]] Failed bad_value(const char* p, const Slot& slot, uint64_t count, uint64_t value) {
  if (*p == '\n') {
    return {p, "the line ends after " + std::to_string(value) + " of the " + std::to_string(count) +
                   " values that slot '" + slot.name + "' announces"};
  }
  return {p, "value " + std::to_string(value + 1) + " of slot '" + slot.name + "' is " + token_at(p) + "; expected " +
                 kind_of(slot)};
}

// Read `count` values into `to`.  Return where they end; nullptr: `at` is the value that is none, `read` its number.
template <typename T, const char* (*kRead)(const char*, T&)>
inline const char* read_values(const char* p, uint64_t count, T* to, const char*& at, uint64_t& read) {
  for (uint64_t i = 0; i < count; ++i) {
    p = skip_blanks(p);
    const char* next = kRead(p, to[i]);
    if (next == nullptr) [[unlikely]] {
      at = p;
      read = i;
      return nullptr;
    }
    p = next;
  }
  return p;
}

inline const char* read_count(const char* p, uint64_t& count) {
  if (static_cast<unsigned char>(p[0] - '1') < 9 && p[1] == ' ') [[likely]] {
    count = static_cast<uint64_t>(p[0] - '0');
    return p + 1;
  }
  Digits found;
  const char* end = read_digits(p, found);
  if (found.count == 0 || found.count > 19 || !ends_number(*end)) return nullptr;
  count = found.value;
  return end;
}

template <typename T, const char* (*kRead)(const char*, T&)>
inline const char* read_column(const char* p, const char* end, const Slot& slot, uint64_t count, Buffer<T>& values,
                               Failed& failed) {
  // A value takes two bytes at least, so what is announced never costs more memory than the text that is there.
  const auto possible = static_cast<uint64_t>(end - p) / 2;
  const uint64_t tried = count <= possible ? count : possible + 1;
  const char* at = nullptr;
  uint64_t number = 0;
  p = read_values<T, kRead>(p, tried, values.room(tried), at, number);
  if (p == nullptr) [[unlikely]] {
    failed = bad_value(at, slot, count, number);
    return nullptr;
  }
  values.commit(count);
  return p;
}

// The values of one slot, with their number before them.  Apart from the loop over the slots, which then keeps what it
// needs in registers.
[[gnu::noinline]] const char* read_slot(const char* p, const char* end, const std::vector<Slot>& slots, std::size_t i,
                                        Column& column, Failed& failed) {
  const Slot& slot = slots[i];
  const char* const at = skip_blanks(p);
  uint64_t count = 0;
  p = read_count(at, count);
  if (p == nullptr) [[unlikely]] {
    failed = no_count(at, slots, i);
    return nullptr;
  }
  if (count == 0 || (slot.width != 0 && count != slot.width)) [[unlikely]] {
    failed = bad_count(at, slot, count);
    return nullptr;
  }
  p = slot.is_float ? read_column<float, read_float>(p, end, slot, count, column.numbers, failed)
                    : read_column<int64_t, read_id>(p, end, slot, count, column.ids, failed);
  if (p != nullptr && slot.width == 0) column.lengths.push(static_cast<int64_t>(count));
  return p;
}

[[gnu::cold, gnu::noinline]] const char* refuse(const char* begin, const std::vector<Slot>& slots, std::size_t slot,
                                                Rows& rows, Failed& failed, Fault& fault) {
  rows.cut(slots, slot);
  fault.column = static_cast<uint64_t>(failed.at - begin) + 1;
  fault.reason = std::move(failed.reason);
  return nullptr;
}

[[gnu::cold, gnu::noinline]] const char* refuse_more(const char* begin, const char* p, const std::vector<Slot>& slots,
                                                     Rows& rows, Fault& fault) {
  Failed failed{
      p, "the line goes on with " + token_at(p) + " after the last of the " + std::to_string(slots.size()) + " slots"};
  return refuse(begin, slots, slots.size(), rows, failed, fault);
}

// " 1 " and a whole number: most of what click data consists of.  nullptr: it is something else.
inline const char* read_single(const char* p, Buffer<int64_t>& values) {
  uint32_t head;
  std::memcpy(&head, p, 4);
  if ((head & 0xFFFFFFU) != 0x203120U) return nullptr;
  const char* const next = read_id(p + 3, *values.room(1));
  if (next != nullptr) [[likely]]
    values.commit(1);
  return next;
}

}  // namespace

const char* read_line(const char* p, const char* end, const std::vector<Slot>& slots, Rows& rows, Fault& fault) {
  const char* const begin = p;
  const Slot* const last = slots.data() + slots.size();
  Column* column = rows.columns.data();
  for (const Slot* slot = slots.data(); slot != last; ++slot, ++column) {
    if (!slot->is_float && slot->width <= 1) {
      const char* const next = read_single(p, column->ids);
      if (next != nullptr) [[likely]] {
        if (slot->width == 0) column->lengths.push(1);
        p = next;
        continue;
      }
    }
    Failed failed{nullptr, {}};
    const auto i = static_cast<std::size_t>(slot - slots.data());
    p = read_slot(p, end, slots, i, *column, failed);
    if (p == nullptr) [[unlikely]]
      return refuse(begin, slots, i, rows, failed, fault);
  }
  p = skip_blanks(p);
  if (*p != '\n') [[unlikely]]
    return refuse_more(begin, p, slots, rows, fault);
  ++rows.count;
  return p + 1;
}

}  // namespace penstock::feed
