// The parts of a CUDA device that c10 and ATen use: its guard (devices, streams, events), hooks and
// allocator. A torch without CUDA registers none of them.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "graph.h"
#include "memory.h"
#include "order.h"
#include "torch_device.h"

namespace emulation {
namespace {

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, has_room(bytes), "CUDA out of memory. Tried to allocate ", bytes,
                     " bytes");
    void* data = bytes == 0 ? nullptr : emulation::allocate(bytes);
    return {data, data, &release, cuda(current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return cuda(current_device()); }
  void setDevice(c10::Device device) const override { current_device() = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device() = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::Stream stream(StreamId id, c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, cuda(index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(current_stream(index_of(device)), device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(new_stream(index_of(device)), device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    current_stream(next.device_index()) = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream& stream) const override { return is_captured(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { host_waits_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    emulation::record(*static_cast<Event*>(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(stream.id(), *static_cast<Event*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits_for(*static_cast<Event*>(event));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

const bool allocator_is_set = (c10::SetAllocator(c10::DeviceType::CUDA, device_allocator()), true);

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

}  // namespace emulation

struct EmulatedHooks : at::CUDAHooksInterface {
  EmulatedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return emulation::kDevices; }
  int getNumGPUs() const override { return emulation::kDevices; }
  c10::DeviceIndex current_device() const override { return emulation::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return emulation::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { emulation::current_device() = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(emulation::current_device(), device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex) const override { emulation::host_waits_for_all(); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return emulation::device_allocator(); }
  // The devices use the CPU's generator, so their random numbers are the CPU's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU));
  }
  std::string showConfig() const override { return "an emulated device"; }
};
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::EmulatedHooks)
}
