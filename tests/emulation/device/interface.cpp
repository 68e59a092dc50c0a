// The functions that Python (torch_cuda.py) and the emulated kernels call, and the functions of the stable
// ABI that only a torch with CUDA has.
#include "graph.h"
#include "memory.h"
#include "order.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace emulation;

EXPORT int64_t emu_new_stream(int device) { return new_stream(device); }
EXPORT int64_t emu_raw_handle(int64_t stream) { return raw_handle(stream); }
EXPORT int64_t emu_stream_of_handle(int64_t raw, int device) { return stream_of_handle(raw, device); }
EXPORT int64_t emu_current_stream(int device) { return current_stream(device); }
EXPORT void emu_set_stream(int device, int64_t stream) { current_stream(device) = stream; }
EXPORT int emu_current_device() { return current_device(); }
EXPORT void emu_set_device(int device) { current_device() = device; }

EXPORT void* emu_event_new() { return new Event; }
EXPORT void emu_event_delete(void* event) { delete static_cast<Event*>(event); }
EXPORT void emu_event_record(void* event, int64_t stream) { record(*static_cast<Event*>(event), stream); }
EXPORT void emu_event_wait(void* event, int64_t stream) { wait(stream, *static_cast<Event*>(event)); }
EXPORT void emu_event_synchronize(void* event) { host_waits_for(*static_cast<Event*>(event)); }
EXPORT void emu_stream_synchronize(int64_t stream) { host_waits_for(stream); }
EXPORT void emu_device_synchronize() { host_waits_for_all(); }

EXPORT const char* emu_take_reports() {
  static std::string taken;  // keeps the returned text valid until the next call
  taken = take_reports();
  return taken.c_str();
}
EXPORT void emu_set_sync_mode(int mode) { set_sync_mode(mode); }
EXPORT size_t emu_allocated_bytes() { return allocated_bytes(); }
EXPORT size_t emu_peak_bytes() { return peak_bytes(); }
EXPORT void emu_reset_peak() { reset_peak(); }
EXPORT void emu_set_limit(size_t bytes) { set_limit(bytes); }

EXPORT int emu_is_captured(int64_t stream) { return is_captured(stream); }
EXPORT void emu_begin_capture(int64_t stream) { begin_capture(stream); }
EXPORT void* emu_end_capture() { return end_capture(); }
EXPORT void emu_replay(void* tape, int64_t stream) { replay(*static_cast<Tape*>(tape), stream); }
EXPORT void emu_delete_tape(void* tape) { delete static_cast<Tape*>(tape); }

// The steps of a kernel launch: begin it, name the memory that it reads and writes, and during a capture
// record a function that runs it again.
namespace {
thread_local Operation launch;
}  // namespace
EXPORT void emu_begin_launch(const char* name, int64_t raw, int device) {
  launch = start(stream_of_handle(raw, device), name);
  const Lock lock(state_mutex());
  check_captured(launch);
}
EXPORT void emu_access(const void* data, int writes) { access(data, writes != 0, launch); }
EXPORT int emu_is_recording() { return is_recording(); }
EXPORT void emu_write_down(void (*run)(void*), void* data) {
  write_down([run, data] { run(data); });
}
EXPORT int emu_access_exactly(const void* data, int bytes, int writes) {
  return access_exactly(data, bytes, writes != 0, launch);
}

EXPORT int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  const int index = device < 0 ? current_device() : device;
  *stream = reinterpret_cast<void*>(raw_handle(current_stream(index)));
  return 0;
}
EXPORT int32_t aoti_torch_create_cuda_guard(int32_t device, void** guard) {
  *guard = new int(current_device());
  current_device() = device;
  return 0;
}
EXPORT int32_t aoti_torch_delete_cuda_guard(void* guard) {
  int* before = static_cast<int*>(guard);
  current_device() = *before;
  delete before;
  return 0;
}
