// Vector clocks for streams, events and the host. They determine which operations are ordered after which.
//
// Each operation on a stream gets that stream's next time. A clock holds a time for each stream: all
// operations of the stream up to that time are known to be finished. When a stream waits for an event, it
// merges the event's clock into its own. When the host waits for a stream, it merges the stream's clock into
// its own. So operation A is ordered before operation B exactly if B's clock contains A, in whatever order
// they ran.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace emulation {

constexpr int kDevices = 2;

// The default stream of device d is number d, so that all streams have different numbers. Its raw handle is
// 0, as in CUDA.
using StreamId = int64_t;
using Clock = std::map<StreamId, uint64_t>;

struct Operation {
  StreamId stream;
  uint64_t time;
  std::string name;
};

struct Event {
  Clock clock;
  StreamId stream = -1;   // the stream that recorded the event; -1 before that
  bool captured = false;  // whether it was recorded in a capture
};

// Protects all state of the emulated device.
std::recursive_mutex& state_mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

// Report an error of the running program: write it to stderr and store it for take_reports().
void report(const std::string& text);
// Return all reports since the last call, one per line.
std::string take_reports();

StreamId new_stream(int device);
int64_t raw_handle(StreamId stream);
StreamId stream_of_handle(int64_t raw, int device);
// The current stream of a device in this thread, and the current device.
StreamId& current_stream(int device);
int& current_device();

// Start an operation, with the stream's next time.
Operation start(StreamId stream, const std::string& name);
bool is_before(const Operation& operation, const Clock& clock);
Clock& clock_of(StreamId stream);

void record(Event& event, StreamId stream);
void wait(StreamId stream, const Event& event);

// The host waits. Copies to the host that it has waited for arrive.
void host_waits_for(StreamId stream);
void host_waits_for(const Event& event);
void host_waits_for_all();
// Call `arrive` once the host has waited for `operation`.
void arrive_after(const Operation& operation, std::function<void()> arrive);

// Set the mode of set_sync_debug_mode(): in mode 2, an implicit wait raises an error.
void set_sync_mode(int mode);
// Call this where PyTorch would wait for the device by itself.
void implicit_wait(StreamId stream, const std::string& name);

}  // namespace emulation
