// Variants of the kernel that adds bfloat16 gradients into float32 sums, side by side, without torch.
//
//   nvcc -O3 -std=c++17 -fmad=false -arch=native gpu_variants.cu -o variants && ./variants [LIST...]
//
// Settles by measurement what csrc/cuda/device/accumulate_block.h only reasons about: elements of a step (16 bytes of
// the sum, or of the gradient), unrolling, registers, chunk size, cache hints, and the price of a launch's
// arguments. LIST: a file with a tensor's number of elements per line, as
// `python -m benchmarks.contestants.model_shapes MODEL` prints it. Every variant is checked against the host, bit for
// bit, before it is timed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#define CHECK(call)                                              \
  do {                                                           \
    const cudaError_t error = call;                              \
    if (error != cudaSuccess) {                                  \
      std::printf("%s: %s\n", #call, cudaGetErrorString(error)); \
      std::exit(1);                                              \
    }                                                            \
  } while (false)

namespace {

constexpr int kThreads = 256;
constexpr int kToday = 8192;  // elements of a chunk
constexpr float kScale = 0.125f;
constexpr int64_t kRoom = int64_t{1} << 28;                    // elements of each side
constexpr int kSmallest = 16, kMiddle = 140, kLargest = 1160;  // tensors that a launch's arguments hold

template <int capacity>
struct Arguments {
  int count, chunk;
  float scale;
  float* sums[capacity];
  const uint16_t* gradients[capacity];
  int64_t sizes[capacity];
  uint32_t first_chunk[capacity];
};

__host__ __device__ float widen(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits << 16);
#else
  bits <<= 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

template <bool hints, typename Vector>
__device__ __forceinline__ Vector load(const void* from) {
  const Vector* at = static_cast<const Vector*>(from);
  return hints ? __ldcs(at) : *at;
}

// step: 4 elements are 16 bytes of the sum, which neighbouring threads then write without gaps; 8 are 16
// bytes of the gradient, and two pieces of the sum that stand 32 bytes apart between neighbours.
template <int capacity, int step, int unroll, int min_blocks, bool hints>
__global__ void __launch_bounds__(kThreads, min_blocks)
    accumulate(const __grid_constant__ Arguments<capacity> arguments) {
  int low = 0, high = arguments.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (arguments.first_chunk[middle] <= blockIdx.x ? low : high) = middle;
  }
  const int64_t begin = int64_t{blockIdx.x - arguments.first_chunk[low]} * arguments.chunk;
  const int count = static_cast<int>(min(int64_t{arguments.chunk}, arguments.sizes[low] - begin));
  float* sums = arguments.sums[low] + begin;
  const uint16_t* gradients = arguments.gradients[low] + begin;
  const float scale = arguments.scale;
  constexpr int kVectors = step / 4, kDistance = kThreads * step;
  int i = threadIdx.x * step;
  for (; i + (unroll - 1) * kDistance + step <= count; i += unroll * kDistance) {
    uint2 fresh[unroll][kVectors];
    float4 old[unroll][kVectors];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if constexpr (step == 8) {
        const uint4 both = load<hints, uint4>(gradients + i + u * kDistance);
        fresh[u][0] = {both.x, both.y};
        fresh[u][1] = {both.z, both.w};
      } else {
        fresh[u][0] = load<hints, uint2>(gradients + i + u * kDistance);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        old[u][v] = reinterpret_cast<const float4*>(sums + i + u * kDistance)[v];
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float4 sum = old[u][v];
        const uint2 pairs = fresh[u][v];
        sum.x = __fmaf_rn(scale, widen(pairs.x & 0xffff), sum.x);
        sum.y = __fmaf_rn(scale, widen(pairs.x >> 16), sum.y);
        sum.z = __fmaf_rn(scale, widen(pairs.y & 0xffff), sum.z);
        sum.w = __fmaf_rn(scale, widen(pairs.y >> 16), sum.w);
        float4* to = reinterpret_cast<float4*>(sums + i + u * kDistance) + v;
        if (hints) {
          __stcs(to, sum);
        } else {
          *to = sum;
        }
      }
    }
  }
  for (; i < count; i += kDistance) {
    for (int k = i; k < min(i + step, count); ++k) {
      sums[k] = __fmaf_rn(scale, widen(gradients[k]), sums[k]);
    }
  }
}

__host__ __device__ uint16_t gradient_at(int64_t i) { return static_cast<uint16_t>(0x3f00 + i % 251); }
__host__ __device__ float sum_at(int64_t i) { return static_cast<float>(i % 127); }

__global__ void fill(uint16_t* gradients, float* sums, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    gradients[i] = gradient_at(i);
    sums[i] = sum_at(i);
  }
}

struct List {
  std::string name;
  std::vector<int64_t> sizes;
};

float *sums, *other;
uint16_t* gradients;
double copy_bandwidth;

int64_t padded(int64_t size) { return (size + 127) / 128 * 128; }

// Seconds of one call: the median over repetitions of `run`, which returns how many calls it has made.
template <typename Run>
double seconds(Run run) {
  constexpr int kWarmUp = 3, kRepetitions = 15;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int repetition = 0; repetition < kWarmUp + kRepetitions; ++repetition) {
    CHECK(cudaEventRecord(begin));
    const int calls = run();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (repetition >= kWarmUp) times.push_back(milliseconds / calls);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e-3;
}

// One launch over the list, its tensors one after another from element `offset` on.
template <int capacity, int step, int unroll, int min_blocks, bool hints>
void launch(const List& list, int chunk, int64_t offset, Arguments<capacity>& arguments) {
  uint32_t blocks = 0;
  arguments.count = static_cast<int>(list.sizes.size());
  arguments.chunk = chunk;
  arguments.scale = kScale;
  for (size_t i = 0; i < list.sizes.size(); ++i) {
    arguments.sums[i] = sums + offset;
    arguments.gradients[i] = gradients + offset;
    arguments.sizes[i] = list.sizes[i];
    arguments.first_chunk[i] = blocks;
    blocks += static_cast<uint32_t>((list.sizes[i] + chunk - 1) / chunk);
    offset += padded(list.sizes[i]);
  }
  accumulate<capacity, step, unroll, min_blocks, hints><<<blocks, kThreads>>>(arguments);
  CHECK(cudaGetLastError());
}

template <int capacity, int step, int unroll, int min_blocks, bool hints>
void check(int chunk) {
  const List list{"check", {1, 1000, kToday, 70001}};
  int64_t total = 0;
  for (const int64_t size : list.sizes) total += padded(size);
  fill<<<1024, kThreads>>>(gradients, sums, total);
  const auto arguments = std::make_unique<Arguments<capacity>>();
  launch<capacity, step, unroll, min_blocks, hints>(list, chunk, 0, *arguments);
  std::vector<float> found(total);
  CHECK(cudaMemcpy(found.data(), sums, total * sizeof(float), cudaMemcpyDeviceToHost));
  int64_t begin = 0;
  for (const int64_t size : list.sizes) {
    for (int64_t i = begin; i < begin + padded(size); ++i) {
      const float expected =
          i < begin + size ? std::fma(kScale, widen(gradient_at(i)), sum_at(i)) : sum_at(i);
      if (found[i] != expected) {
        std::printf("step %d unroll %d chunk %d: element %lld is %g, expected %g\n", step, unroll, chunk,
                    static_cast<long long>(i), found[i], expected);
        std::exit(1);
      }
    }
    begin += padded(size);
  }
}

template <int capacity, int step, int unroll, int min_blocks, bool hints>
void variant(const List& list, int chunk) {
  if (static_cast<int>(list.sizes.size()) > capacity) return;
  int64_t total = 0, elements = 0;
  for (const int64_t size : list.sizes) {
    total += padded(size);
    elements += size;
  }
  if (total > kRoom) {
    std::printf("%s: %lld elements, there is room for %lld\n", list.name.c_str(),
                static_cast<long long>(total), static_cast<long long>(kRoom));
    std::exit(1);
  }
  check<capacity, step, unroll, min_blocks, hints>(chunk);
  // In turns over several places in memory, so that no launch finds in the cache what the one before has
  // left.
  const int places = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(8, kRoom / total)));
  const auto arguments = std::make_unique<Arguments<capacity>>();
  const double time = seconds([&] {
    for (int place = 0; place < places; ++place) {
      launch<capacity, step, unroll, min_blocks, hints>(list, chunk, place * total, *arguments);
    }
    return places;
  });
  const double bandwidth = 10.0 * elements / time;
  std::printf(
      "%-12s arguments %5zu step %d unroll %d min blocks %d hints %d chunk %6d: %9.1f us %7.1f GB/s %5.1f %% "
      "of "
      "copy\n",
      list.name.c_str(), sizeof(*arguments), step, unroll, min_blocks, hints, chunk, time * 1e6,
      bandwidth * 1e-9, bandwidth / copy_bandwidth * 100);
}

template <int capacity>
void variants(const List& list) {
  variant<capacity, 8, 2, 1, false>(list, kToday);
  variant<capacity, 8, 2, 4, false>(list, kToday);
  variant<capacity, 8, 2, 4, true>(list, kToday);
  variant<capacity, 4, 4, 1, false>(list, kToday);
  variant<capacity, 4, 4, 4, false>(list, kToday);
  variant<capacity, 4, 4, 4, true>(list, kToday);
  for (const int chunk : {2048, 4096, 32768, 65536}) {
    variant<capacity, 4, 2, 4, false>(list, chunk);
    variant<capacity, 4, 4, 4, false>(list, chunk);
  }
}

}  // namespace

int main(int count, char** files) {
  CHECK(cudaMalloc(&sums, kRoom * sizeof(float)));
  CHECK(cudaMalloc(&other, kRoom * sizeof(float)));
  CHECK(cudaMalloc(&gradients, kRoom * sizeof(uint16_t)));
  fill<<<1024, kThreads>>>(gradients, sums, kRoom);
  CHECK(cudaDeviceSynchronize());
  const double time = seconds([] {
    CHECK(cudaMemcpyAsync(other, sums, kRoom * sizeof(float), cudaMemcpyDeviceToDevice));
    return 1;
  });
  copy_bandwidth = 2.0 * sizeof(float) * kRoom / time;
  std::printf("copy: %.1f GB/s\n", copy_bandwidth * 1e-9);
  for (const List& list : {List{"1Ki", {1 << 10}}, List{"64Ki", {1 << 16}}, List{"512Ki", {1 << 19}},
                           List{"1Mi", {1 << 20}}, List{"4Mi", {1 << 22}}, List{"256Mi", {kRoom}}}) {
    variants<kSmallest>(list);
    variant<kMiddle, 4, 4, 4, false>(list, kToday);
    variant<kLargest, 8, 2, 1, false>(list, kToday);
    variant<kLargest, 4, 4, 4, false>(list, kToday);
  }
  for (int i = 1; i < count; ++i) {
    List list;
    list.name = files[i];
    list.name = list.name.substr(list.name.rfind('/') + 1);
    std::ifstream file(files[i]);
    for (int64_t size; file >> size;) list.sizes.push_back(size);
    if (list.sizes.empty() || list.sizes.size() > kLargest) {
      std::printf("%s: 1 to %d numbers wanted, %zu found\n", files[i], kLargest, list.sizes.size());
      return 1;
    }
    variants<kLargest>(list);
    variant<288, 4, 4, 4, false>(list, kToday);
  }
  CHECK(cudaDeviceSynchronize());
  return 0;
}
