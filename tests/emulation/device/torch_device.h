// The emulated device as a c10::Device.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace emulation {

inline c10::Device cuda(int index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }
c10::Allocator* device_allocator();

}  // namespace emulation
