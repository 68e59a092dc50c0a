// The functions that translated PTX calls. A thread's registers are local variables that hold raw bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
// Record an access of the running launch. Return whether it is inside one allocation of the device.
int emu_access_exactly(const void* data, int bytes, int writes);
}

namespace {

template <typename T>
inline T as(uint64_t bits) {
  if constexpr (std::is_same_v<T, bool>) {
    return bits & 1;
  } else {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
}
template <typename T>
inline uint64_t raw(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

// Global memory: an access must be aligned, and all its bytes must be in one allocation.
inline char* global(uint64_t address, int bytes, bool stores) {
  if (address % bytes != 0) emulation::fail(stores ? "a misaligned store" : "a misaligned load");
  char* at = reinterpret_cast<char*>(address);
  if (!emu_access_exactly(at, bytes, stores)) {
    emulation::fail(stores ? "a store outside of all tensors" : "a load outside of all tensors");
  }
  return at;
}

inline char* shared(uint64_t offset, int bytes) {
  if (offset % bytes != 0) emulation::fail("a misaligned access to shared memory");
  if (offset + bytes > emulation::kSharedBytes) emulation::fail("an access outside of shared memory");
  return emulation::shared_memory + offset;
}

template <typename T>
inline T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}
template <typename T>
inline void store(char* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

template <typename T>
inline T minimum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
  return a < b ? a : b;
}
template <typename T>
inline T maximum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a > b ? a : b;
}
template <typename T>
inline T shift_left(T value, uint32_t count) {
  return count >= sizeof(T) * 8 ? 0 : value << count;
}
template <typename T>
inline T shift_right(T value, uint32_t count) {
  constexpr uint32_t kBits = sizeof(T) * 8;
  if (count < kBits) return value >> count;
  return std::is_signed_v<T> && value < 0 ? -1 : 0;
}
inline uint32_t funnel_shift_left(uint32_t low, uint32_t high, uint32_t count) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(both << (count & 31) >> 32);
}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> (4 * i) & 15;
    uint32_t byte = bytes >> (8 * (choice & 7)) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
template <typename T>
inline T insert_bits(T source, T base, uint32_t position, uint32_t length) {
  position &= 255;
  length &= 255;
  if (position >= sizeof(T) * 8 || length == 0) return base;
  const T ones = length >= sizeof(T) * 8 ? ~T{0} : (T{1} << length) - 1;
  const T mask = static_cast<T>(ones << position);
  return (base & ~mask) | (static_cast<T>(source << position) & mask);
}
inline void check_whole_warp(uint32_t lanes) {
  if (lanes != 0xffffffffu) emulation::fail("an exchange of a part of a warp");
}
inline uint32_t exchange(uint32_t value, uint32_t other, uint32_t clamp, uint32_t lanes) {
  check_whole_warp(lanes);
  if (clamp != 31 || other > 31) emulation::fail("an exchange within a part of a warp");
  return static_cast<uint32_t>(emulation::exchange(value, static_cast<int>(other)));
}
inline uint32_t exchange_from(uint32_t value, uint32_t source, uint32_t clamp, uint32_t lanes) {
  check_whole_warp(lanes);
  if (clamp != 31 || source > 31) emulation::fail("an exchange within a part of a warp");
  return static_cast<uint32_t>(emulation::exchange_from(value, static_cast<int>(source)));
}
// Store four 8x8 matrices of 16-bit elements. Lane 8 * m + r holds the address of row r of matrix m. Lane l
// holds two adjacent elements of row l / 4 of each matrix.
inline void store_matrices(uint64_t address, const uint32_t (&words)[4]) {
  const uint32_t lane = emulation::thread_index.x % 32;
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    const uint64_t row = emulation::exchange_from(address, static_cast<int>(8 * matrix + lane / 4));
    if (row % 16 != 0) emulation::fail("a misaligned row of a matrix");
    store(shared(row + lane % 4 * 4, 4), words[matrix]);
  }
}
// Load four matrices that are laid out in the same way. If `transposes`, a lane gets two adjacent elements of
// a column instead of a row.
template <bool transposes>
inline void load_matrices(uint64_t address, uint32_t (&words)[4]) {
  const uint32_t lane = emulation::thread_index.x % 32;
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t row = transposes ? lane % 4 * 2 + i : lane / 4;
      const uint32_t column = transposes ? lane / 4 : lane % 4 * 2 + i;
      const uint64_t at = emulation::exchange_from(address, static_cast<int>(8 * matrix + row));
      if (at % 16 != 0) emulation::fail("a misaligned row of a matrix");
      pair[i] = load<uint16_t>(shared(at + 2 * column, 2));
    }
    words[matrix] = static_cast<uint32_t>(pair[1]) << 16 | pair[0];
  }
}
// Extract a bit field. In a signed type, the field's highest bit is its sign.
template <typename T>
inline T extract_bits(T value, uint32_t position, uint32_t length) {
  constexpr uint32_t kBits = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (length == 0) return 0;
  const uint32_t end = position + length < kBits ? position + length : kBits;
  if (position >= kBits) return shift_right(value, kBits);
  const T upper = static_cast<T>(static_cast<std::make_unsigned_t<T>>(value) << (kBits - end));
  return upper >> (kBits - end + position);
}
template <typename T, typename Join>
inline T reduce_warp(T value, uint32_t lanes, Join join) {
  check_whole_warp(lanes);
  for (int other = 16; other > 0; other /= 2) {
    value = join(value, static_cast<T>(emulation::exchange(raw(value), other)));
  }
  return value;
}

// A GPU turns every NaN into 0x7fff.
inline float from_bf16(uint16_t bits) { return as<float>(static_cast<uint64_t>(bits) << 16); }
inline uint16_t to_bf16(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = static_cast<uint32_t>(raw(value));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_f16(uint16_t bits) { return static_cast<float>(as<_Float16>(bits)); }
inline uint16_t to_f16(float value) {
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>(raw(static_cast<_Float16>(value)));
}

}  // namespace
