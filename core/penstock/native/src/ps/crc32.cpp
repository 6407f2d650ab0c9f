#include "ps/crc32.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock::ps {
namespace {

// [k][b]: the checksum of byte b with k zero bytes behind it.
constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> out{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? 0xEDB88320U : 0U);
    out[0][byte] = sum;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t one = out[k - 1][byte];
      out[k][byte] = (one >> 8) ^ out[0][one & 0xFF];
    }
  }
  return out;
}();

// Of complemented checksums.
std::uint32_t by_tables(std::uint32_t sum, const unsigned char* at, std::size_t size) {
  if constexpr (std::endian::native == std::endian::little) {
    for (; size >= 8; size -= 8, at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, at, sizeof word);
      word ^= sum;
      sum = 0;
      for (std::size_t byte = 0; byte < 8; ++byte) sum ^= kTables[7 - byte][(word >> (8 * byte)) & 0xFF];
    }
  }
  for (; size > 0; --size, ++at) sum = (sum >> 8) ^ kTables[0][(sum ^ *at) & 0xFF];
  return sum;
}

#if defined(__x86_64__)

// 128 bits of the message moved on by as many bits as `by` stands for, onto `next`.
__attribute__((target("pclmul,sse4.1"))) inline __m128i moved(__m128i sum, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00), high = _mm_clmulepi64_si128(sum, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i loaded(const unsigned char* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// By multiplication of polynomials. The constants are powers of x modulo the polynomial: Gopal and others, "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009. `size`: at least 64, in whole 16s.
__attribute__((target("pclmul,sse4.1"))) std::uint32_t by_products(std::uint32_t sum, const unsigned char* at,
                                                                   std::size_t size) {
  const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_32 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i quotient = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_words = _mm_set_epi32(0, -1, 0, -1);
  __m128i a = _mm_xor_si128(loaded(at), _mm_cvtsi32_si128(static_cast<int>(sum)));
  __m128i b = loaded(at + 16), c = loaded(at + 32), d = loaded(at + 48);
  for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
    a = moved(a, by_512, loaded(at));
    b = moved(b, by_512, loaded(at + 16));
    c = moved(c, by_512, loaded(at + 32));
    d = moved(d, by_512, loaded(at + 48));
  }
  a = moved(moved(moved(a, by_128, b), by_128, c), by_128, d);
  for (; size >= 16; at += 16, size -= 16) a = moved(a, by_128, loaded(at));
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128, 0x10));  // 128 bits to 96
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_32, 0x00));  // to 64
  __m128i times = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), quotient, 0x10);                        // to 32
  times = _mm_clmulepi64_si128(_mm_and_si128(times, low_words), quotient, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, times), 1));
}

const bool kHasProducts = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");

#endif

}  // namespace

std::uint32_t crc32(std::uint32_t before, const void* data, std::size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t sum = ~before;
#if defined(__x86_64__)
  if (kHasProducts && size >= 64) {
    const std::size_t whole = size & ~std::size_t{15};
    sum = by_products(sum, at, whole);
    at += whole;
    size -= whole;
  }
#endif
  return ~by_tables(sum, at, size);
}

}  // namespace penstock::ps
