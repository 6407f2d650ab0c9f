// CRC-32 as zlib has it (polynomial 0xEDB88320, reflected), several bytes a clock cycle.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::ps {

// Goes on from the checksum of what was before; 0 at the beginning.
std::uint32_t crc32(std::uint32_t before, const void* data, std::size_t size);

}  // namespace penstock::ps
