// What the host checks share: an assertion that says where, numbers that are the same on every run, and bits.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                             \
    }                                                                           \
  } while (false)

inline std::mt19937_64 generator(1);

inline int64_t random_below(int64_t limit) {
  return static_cast<int64_t>(generator() % static_cast<uint64_t>(limit));
}

// As a sum's stream is, of a parameter and an addition.
inline uint64_t random_stream() {
  return static_cast<uint64_t>(random_below(1000)) | static_cast<uint64_t>(random_below(1 << 30)) << 32;
}

template <typename T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}
