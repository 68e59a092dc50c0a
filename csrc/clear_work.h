// What clearing memory has to do where a flag beside it says so. Torch-free.
#pragma once

#include <cstdint>

#include "chunk_plan.h"

namespace fusedacc {

// A bool or a floating number of so many bytes.
struct Flag {
  const void* data;
  int32_t bytes;
};

// Whether it is not 0; a nan is not. Of a zero, all bits but the sign are 0.
FUSEDACC_INLINE bool is_set(const Flag& flag) {
  switch (flag.bytes) {
    case 8:
      return (*static_cast<const uint64_t*>(flag.data) << 1) != 0;
    case 4:
      return (*static_cast<const uint32_t*>(flag.data) << 1) != 0;
    case 2:
      return (*static_cast<const uint16_t*>(flag.data) & 0x7fff) != 0;
    default:
      return *static_cast<const uint8_t*>(flag.data) != 0;
  }
}

// The flag is not in the memory that is cleared: others look at it while some of that is already 0.
struct ClearWork {
  void* data;
  int64_t bytes;
  Flag flag;
};

}  // namespace fusedacc
