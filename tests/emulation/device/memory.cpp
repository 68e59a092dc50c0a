#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "graph.h"

namespace emulation {
namespace {

struct Accesses {
  std::optional<Operation> write;
  std::map<StreamId, Operation> reads;  // the last read of each stream after that write
};

struct Block {
  size_t bytes;
  StreamId stream;  // the stream that allocated the block and that gets it back
  bool in_graph;    // allocated in a capture, from the graph's pool; never freed
  Accesses accesses;
  std::set<StreamId> recorded;
};

std::map<uintptr_t, Block> blocks;
size_t allocated = 0;
size_t peak = 0;
size_t limit = std::numeric_limits<size_t>::max();
bool checking = true;

// For each stream, the operations of other streams on memory that this stream released without
// record_stream(). The caching allocator may give that memory to this stream again at once.
std::map<StreamId, std::vector<Operation>> still_in_use;

struct Saved {
  std::vector<char> content;
  Accesses accesses;
};
std::map<uintptr_t, Saved> saved;
std::vector<void*> released_in_capture;

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

Block* find(const void* data) {
  auto found = blocks.upper_bound(address(data));
  if (found == blocks.begin()) return nullptr;
  --found;
  const size_t size = std::max<size_t>(found->second.bytes, 1);
  return address(data) < found->first + size ? &found->second : nullptr;
}

std::string on(const Operation& operation) {
  return operation.name + " on stream " + std::to_string(operation.stream);
}

void check_reuse(StreamId stream) {
  const auto found = still_in_use.find(stream);
  if (found == still_in_use.end()) return;
  start(stream, "allocation");  // adds the work that the host has waited for to the stream's clock
  for (const Operation& user : found->second) {
    if (!is_before(user, clock_of(stream))) {
      report("stream " + std::to_string(stream) + " may be given memory again that " + on(user) +
             " may still use");
    }
  }
  still_in_use.erase(found);
}

}  // namespace

void* allocate(size_t bytes) {
  void* data = nullptr;
  const size_t room = (std::max<size_t>(bytes, 1) + 511) / 512 * 512;
  if (posix_memalign(&data, 512, room) != 0) throw std::bad_alloc();
  std::memset(data, 0xAB, room);
  const Lock lock(state_mutex());
  const StreamId stream = current_stream(current_device());
  if (checking) check_reuse(stream);
  blocks[address(data)] = {bytes, stream, is_recording(), {}, {}};
  allocated += bytes;
  peak = std::max(peak, allocated);
  return data;
}

void release(void* data) {
  if (data == nullptr) return;
  const Lock lock(state_mutex());
  const auto found = blocks.find(address(data));
  if (found == blocks.end() || found->second.in_graph) return;
  if (is_recording()) {
    released_in_capture.push_back(data);
    return;
  }
  const Block& block = found->second;
  start(block.stream, "release");  // adds the work that the host has waited for to the stream's clock
  const Clock& clock = clock_of(block.stream);
  const auto note_user = [&](const Operation& user) {
    const bool is_unrecorded = user.stream != block.stream && block.recorded.count(user.stream) == 0;
    if (checking && is_unrecorded && !is_before(user, clock)) still_in_use[block.stream].push_back(user);
  };
  if (block.accesses.write) note_user(*block.accesses.write);
  for (const auto& [stream, read] : block.accesses.reads) note_user(read);
  allocated -= block.bytes;
  blocks.erase(found);
  std::free(data);
}

bool is_allocated(const void* data) {
  const Lock lock(state_mutex());
  return find(data) != nullptr;
}

void record_use(const void* data, StreamId stream) {
  const Lock lock(state_mutex());
  if (Block* block = find(data)) block->recorded.insert(stream);
}

void access(const void* data, bool writes, const Operation& operation) {
  if (data == nullptr) return;
  const Lock lock(state_mutex());
  Block* block = checking ? find(data) : nullptr;
  if (block == nullptr) return;
  const Clock& known = clock_of(operation.stream);
  Accesses& before = block->accesses;
  if (before.write && !is_before(*before.write, known)) {
    report(on(operation) + (writes ? " writes" : " reads") + " without waiting for " + on(*before.write) +
           ", which writes");
  }
  if (!writes) {
    before.reads[operation.stream] = operation;
    return;
  }
  for (const auto& [stream, read] : before.reads) {
    if (!is_before(read, known)) {
      report(on(operation) + " writes without waiting for " + on(read) + ", which reads");
    }
  }
  before = {operation, {}};
}

bool access_exactly(const void* data, size_t bytes, bool writes, const Operation& operation) {
  // Blocks that this launch has already accessed. Most accesses are to the same few blocks as the last ones.
  struct Touched {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    StreamId stream = -1;
    uint64_t time = 0;
    bool writes = false;
  };
  constexpr int kRemembered = 8;
  thread_local Touched remembered[kRemembered];
  thread_local int oldest = 0;
  const uintptr_t begin = address(data);
  const uintptr_t end = begin + bytes;
  for (const Touched& block : remembered) {
    const bool is_this_launch = block.stream == operation.stream && block.time == operation.time;
    const bool is_inside = begin >= block.begin && end <= block.end;
    if (is_this_launch && is_inside && (block.writes || !writes)) return true;
  }
  const Lock lock(state_mutex());
  const Block* block = find(data);
  if (block == nullptr) return false;
  const uintptr_t first = std::prev(blocks.upper_bound(begin))->first;
  if (end > first + block->bytes) return false;
  access(data, writes, operation);
  remembered[oldest] = {first, first + block->bytes, operation.stream, operation.time, writes};
  oldest = (oldest + 1) % kRemembered;
  return true;
}

void first_write(const void* data, const Operation& operation) {
  const Lock lock(state_mutex());
  Block* block = find(data);
  if (block != nullptr && !block->accesses.write) block->accesses.write = operation;
}

size_t allocated_bytes() { return allocated; }
size_t peak_bytes() { return peak; }
void reset_peak() { peak = allocated; }
void set_limit(size_t bytes) { limit = bytes; }
bool has_room(size_t bytes) { return allocated + bytes <= limit; }
void set_checking(bool on) { checking = on; }
bool is_checking() { return checking; }

void save_memory() {
  saved.clear();
  for (const auto& [at, block] : blocks) {
    const char* data = reinterpret_cast<const char*>(at);
    saved[at] = {{data, data + block.bytes}, block.accesses};
  }
}

void restore_memory() {
  for (auto& [at, block] : blocks) {
    const auto found = saved.find(at);
    if (found == saved.end()) {
      block.accesses = {};
      continue;
    }
    std::memcpy(reinterpret_cast<void*>(at), found->second.content.data(), block.bytes);
    block.accesses = found->second.accesses;
  }
  saved.clear();
  for (void* data : std::exchange(released_in_capture, {})) release(data);
}

}  // namespace emulation
