// Whole and decimal numbers from text, eight digits at a time.
//
// The text ends with a byte that is no part of a number (a line end), and at least 32 bytes may be read behind it.
// A number ends at a space, a tab or a line end, more exactly at any byte up to ' '; what is wrong with such a byte is
// seen by the next read.  Results are those of strtoull, with a sign allowed, and of strtof, correctly rounded.
#pragma once

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace penstock::feed {

static_assert(std::endian::native == std::endian::little, "eight digits are read as one little-endian number");

inline constexpr uint64_t kPowers[] = {1ULL,
                                       10ULL,
                                       100ULL,
                                       1000ULL,
                                       10000ULL,
                                       100000ULL,
                                       1000000ULL,
                                       10000000ULL,
                                       100000000ULL,
                                       1000000000ULL,
                                       10000000000ULL,
                                       100000000000ULL,
                                       1000000000000ULL,
                                       10000000000000ULL,
                                       100000000000000ULL,
                                       1000000000000000ULL,
                                       10000000000000000ULL,
                                       100000000000000000ULL,
                                       1000000000000000000ULL,
                                       10000000000000000000ULL};

inline constexpr double kExactPowers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,
                                          1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19};

inline bool ends_number(char c) {
  return static_cast<unsigned char>(c) <= ' ';
}

struct Digits {
  uint64_t value;
  uint32_t count;
};

// The digits at the front of eight bytes.
inline Digits eight_digits(const char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  const uint64_t x = word ^ 0x3030303030303030ULL;  // a digit is 0 to 9 now
  // The top bit of each byte that is no digit.  A carry reaches later bytes only, and the first one is what counts.
  const uint64_t others = ((x + 0x7676767676767676ULL) | x) & 0x8080808080808080ULL;
  const uint32_t count = others == 0 ? 8 : static_cast<uint32_t>(std::countr_zero(others)) >> 3;
  if (count == 0) return {0, 0};
  uint64_t d = x << (64 - 8 * count);
  d = d * 10 + (d >> 8);
  const uint64_t pairs = 0x000000FF000000FFULL;
  const uint64_t value = ((d & pairs) * 0x000F424000000064ULL + ((d >> 16) & pairs) * 0x0000271000000001ULL) >> 32;
  return {value & 0xFFFFFFFFULL, count};
}

// Read digits; `value` is right if there are at most 19.  Return the first byte that is none.
inline const char* read_digits(const char* p, Digits& found) {
  found = eight_digits(p);
  p += found.count;
  if (found.count < 8) return p;
  for (uint32_t more = 8; more == 8;) {
    const Digits next = eight_digits(p);
    found.value = found.value * kPowers[next.count] + next.value;
    found.count += next.count;
    p += next.count;
    more = next.count;
  }
  return p;
}

inline const char* token_end(const char* p) {
  while (!ends_number(*p)) ++p;
  return p;
}

// A whole number without a sign.  nullptr: it is none, or has more than 64 bits.
inline const char* read_unsigned(const char* p, uint64_t& out) {
  Digits found;
  const char* end = read_digits(p, found);
  if (found.count == 0 || !ends_number(*end)) [[unlikely]]
    return nullptr;
  if (found.count > 19) [[unlikely]] {
    if (std::from_chars(p, end, found.value).ec != std::errc()) return nullptr;
  }
  out = found.value;
  return end;
}

// -2^63 to 2^64 - 1, the upper half as the int64 of the same bits.  nullptr: this is no such number.
inline const char* read_id(const char* p, int64_t& out) {
  const bool negative = *p == '-';
  uint64_t value = 0;
  if (negative) [[unlikely]] {  // a branch: where the digits begin must not wait for the byte
    p = read_unsigned(p + 1, value);
    if (value > (1ULL << 63)) return nullptr;
    out = static_cast<int64_t>(0 - value);
    return p;
  }
  p = read_unsigned(p, value);
  out = static_cast<int64_t>(value);
  return p;
}

// Whether a decimal number that is beyond the range of a double is so because it is small.
inline bool is_below_one(const char* p, const char* end) {
  const char* digits = p + (*p == '-');
  const char* stop = digits;
  while (stop != end && *stop != 'e' && *stop != 'E') ++stop;
  int64_t exponent = 0;
  if (stop != end) {
    const bool negative = stop[1] == '-';
    const char* from = stop + 1 + (negative || stop[1] == '+');
    if (std::from_chars(from, end, exponent).ec != std::errc()) return negative;  // beyond any number of digits
    exponent = std::min<int64_t>(exponent, 1LL << 40);  // more than any digits that are there can make up for
    if (negative) exponent = -exponent;
  }
  const char* point = digits;
  while (point != stop && *point != '.') ++point;
  const char* first = digits;
  while (first != stop && (*first == '0' || *first == '.')) ++first;
  return exponent + (first < point ? point - first : point + 1 - first) <= 0;
}

// Any finite decimal number, by the library.  Too small for a float is 0, too large is none.
inline const char* read_float_slowly(const char* p, float& out) {
  const char* end = token_end(p);
  const char* first = p + (*p == '+');
  if (first == end || *first == '+') return nullptr;
  if (first != p && *first == '-') return nullptr;
  const auto [stop, error] = std::from_chars(first, end, out);
  if (stop != end) return nullptr;
  if (error == std::errc::result_out_of_range) {
    double wide = 0;
    if (std::from_chars(first, end, wide).ec == std::errc()) {
      if (std::fabs(wide) > 1) return nullptr;
      out = static_cast<float>(wide);
      return end;
    }
    if (!is_below_one(first, end)) return nullptr;
    out = *first == '-' ? -0.0F : 0.0F;
    return end;
  }
  return std::isfinite(out) ? end : nullptr;
}

// A decimal number without sign and exponent; `text` is where it begins, sign included.
template <bool kNegative>
inline const char* read_decimal(const char* text, float& out) {
  Digits whole;
  const char* end = read_digits(text + kNegative, whole);
  if (*end != '.') {
    if (whole.count == 0 || whole.count > 19 || !ends_number(*end)) return read_float_slowly(text, out);
    out = static_cast<float>(whole.value);
    if (kNegative) out = -out;
    return end;
  }
  Digits part;
  end = read_digits(end + 1, part);
  const uint32_t count = whole.count + part.count;
  if (count == 0 || count > 19 || !ends_number(*end)) return read_float_slowly(text, out);
  const uint64_t digits = whole.value * kPowers[part.count] + part.value;
  if (digits >> 53 != 0) return read_float_slowly(text, out);
  // Both are exact doubles, so the quotient is the double nearest to the number; the float nearest to that is the
  // nearest to the number, too, unless it lies half-way between two floats.
  const double quotient = static_cast<double>(static_cast<int64_t>(digits)) / kExactPowers[part.count];
  if ((std::bit_cast<uint64_t>(quotient) & 0x1FFFFFFFULL) == 0x10000000ULL) return read_float_slowly(text, out);
  out = static_cast<float>(kNegative ? -quotient : quotient);
  return end;
}

// nullptr: this is no finite number of float32.
inline const char* read_float(const char* p, float& out) {
  return *p == '-' ? read_decimal<true>(p, out) : read_decimal<false>(p, out);
}

}  // namespace penstock::feed
