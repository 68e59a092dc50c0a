// What the values of a block's threads join to.
#pragma once

#include <cstdint>

namespace fusedacc::cuda {

// For every thread alike. Each warp by exchanges, then all warps' values by every warp; `join` commutes, so
// that all get the same bits.
template <int32_t threads>
struct JoinBlock {
  template <typename Functor, typename Value>
  __device__ __forceinline__ typename Functor::State operator()(Functor, Value&& value) const {
    using State = typename Functor::State;
    constexpr int32_t warps = threads / 32;
    __shared__ State of_warp[warps];
    State state = value(static_cast<int32_t>(threadIdx.x));
#pragma unroll
    for (int32_t other = 16; other > 0; other /= 2) {
      state = Functor::join(state, __shfl_xor_sync(0xffffffffu, state, other));
    }
    __syncthreads();  // a join before may still be read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = state;
    __syncthreads();
    state = of_warp[threadIdx.x % warps];
#pragma unroll
    for (int32_t other = warps / 2; other > 0; other /= 2) {
      state = Functor::join(state, __shfl_xor_sync(0xffffffffu, state, other));
    }
    return state;
  }
};

}  // namespace fusedacc::cuda
