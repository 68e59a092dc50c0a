// The random bits of stochastic rounding, on the host: those of Philox, and those that a GPU's thread takes
// for several elements at once. Prints what fails and exits with 1.
#include <cstring>

#include "cuda/device/accumulate_block.h"

#include "check.h"

using namespace fusedacc;

namespace {

// The known answers of its authors' Random123, kat_vectors.
void check_philox() {
  struct Answer {
    Noise noise;
    uint64_t block;
    uint32_t words[4];
  };
  const Answer answers[] = {
      {{0, 0}, 0, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{~uint64_t{0}, ~uint64_t{0}}, ~uint64_t{0}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x299f31d0a4093822, 0x0370734413198a2e},
       0x85a308d3243f6a88,
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}};
  for (const Answer& answer : answers) {
    const random::Words words = random::philox(answer.noise, answer.block);
    CHECK(std::memcmp(words.values, answer.words, sizeof(answer.words)) == 0);
    for (int32_t i = 0; i < 8; ++i) {
      CHECK(random::bits_of(words, i) == (answer.words[i / 2] >> 16 * (i % 2) & 0xffff));
    }
  }
}

template <int32_t count, bool in_block, typename Functor>
void check_neighbours(const Functor& functor, int64_t offset) {
  const auto bits = cuda::neighbour_bits<count, in_block>(functor, offset);
  for (int32_t i = 0; i < count; ++i) CHECK(bits[i] == functor.bits_at(offset + i));
}

// Wherever neighbours begin, beyond 32 bits of elements and of counters too.
void check_neighbours() {
  for (const int64_t first : {int64_t{0}, (int64_t{1} << 32) - 9, (int64_t{1} << 35) - 9, int64_t{1} << 40}) {
    const Noise noise{generator(), random_stream(), first};
    const ScaleAccumulate<float, StochasticBFloat16> functor({0.3, 0.7, noise});
    for (int64_t offset = 0; offset < 24; ++offset) {
      check_neighbours<1, true>(functor, offset);
      check_neighbours<4, false>(functor, offset);
      check_neighbours<8, false>(functor, offset);
      if ((first + offset) % 4 == 0) check_neighbours<4, true>(functor, offset);
      if ((first + offset) % 8 == 0) check_neighbours<8, true>(functor, offset);
    }
  }
}

}  // namespace

int main() {
  check_philox();
  check_neighbours();
  std::printf("random bits agree\n");
  return 0;
}
