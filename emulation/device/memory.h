// The emulated device's memory: host memory in blocks that remember who has read and written them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "order.h"

namespace emulation {

// A block for the current stream of the current device, aligned and rounded up to 512 bytes as the caching
// allocator does. It is filled with bytes that make no sensible number.
void* allocate(size_t bytes);
void release(void* data);
// Whether an address is in a block that is in use.
bool is_allocated(const void* data);
// tensor.record_stream().
void record_use(const void* data, StreamId stream);

// Note that an operation reads or writes the block around an address, and report it if it is not ordered
// after the block's earlier writes, or, for a write, after its earlier reads.
void access(const void* data, bool writes, const Operation& operation);
// The same for one access of a kernel, as it happens. Returns whether all of it is in one block.
bool access_exactly(const void* data, size_t bytes, bool writes, const Operation& operation);
// A fresh block's first content, which nothing can race with.
void first_write(const void* data, const Operation& operation);

size_t allocated_bytes();
size_t peak_bytes();
void reset_peak();

// Off while a graph is replayed: its operations were checked when they were captured.
void set_checking(bool on);
bool is_checking();

// For captures: all blocks' contents and accesses, put back later; releases are put off in between.
void save_memory();
void restore_memory();

}  // namespace emulation
