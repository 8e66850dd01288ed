// What the parts of the null GPU share: devices, what was counted, and streams.
#pragma once
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace null_gpu {

struct Device {
  int capability;  // such as 90 for 9.0
  size_t total, used;
  char* memory;  // address space, never touched
  char* next;    // the first address that was never handed out
};

extern std::recursive_mutex mutex;
std::vector<Device>& devices();
Device& current();
int current_number();

// --- memory
char* allocate(size_t size);            // on the current device; nullptr if it is full
bool take(Device& device, size_t size);  // memory without an address; false if the device is full
char* reserve(size_t size);             // an address of the current device without memory
bool release(void* pointer);
int device_of(const void* pointer);  // -1: memory of the host
bool is_pinned(const void* pointer);

// --- what happens is counted by its kind ("launch", "copy", "wait"…) and what it is
void note(const std::string& kind, const std::string& what, double amount = 1);
void missing(const std::string& what);  // counted as "not implemented", and said, because an error follows
cudaError_t failed(cudaError_t error);  // remembered for cudaGetLastError

// --- a device that fails: every later call gives the same error, as after a fault in a kernel (CUDA Runtime API,
// cudaErrorLaunchFailure: "this leaves the process in an inconsistent state")
bool is_failing();

// --- streams
// Count work of a stream, or add it to the graph that the stream records.
cudaError_t submit(cudaStream_t stream, const std::string& kind, const std::string& what, double amount = 1);
// Refuse a call that CUDA forbids while a graph is recorded.
cudaError_t refuse_while_recording(const char* name);

}  // namespace null_gpu
