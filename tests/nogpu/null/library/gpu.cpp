// The state of the null GPU: its devices, their address space, and the counts that tests read.
//
// NULL_GPU_CAPABILITIES=90,86   the devices, by their compute capability
// NULL_GPU_MIB=81559,24564      their memory
#include "gpu.hpp"

#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>

namespace null_gpu {

std::recursive_mutex mutex;
static const size_t kAddresses = 1ull << 42, kPage = 1 << 21;
static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

static std::vector<size_t> numbers(const char* variable, const char* otherwise) {
  std::vector<size_t> found;
  std::stringstream text(getenv(variable) ? getenv(variable) : otherwise);
  for (std::string part; std::getline(text, part, ',');) found.push_back(strtoull(part.c_str(), nullptr, 10));
  return found;
}

std::vector<Device>& devices() {
  static auto* all = [] {
    auto* made = new std::vector<Device>;
    auto capabilities = numbers("NULL_GPU_CAPABILITIES", "90"), mib = numbers("NULL_GPU_MIB", "81559");
    for (size_t i = 0; i < capabilities.size(); i++) {
      // No page is ever readable: a program that touches the memory of a GPU from the host crashes, as on a real one.
      void* memory = mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) abort();
      auto* start = static_cast<char*>(memory);
      made->push_back({int(capabilities[i]), mib[i < mib.size() ? i : mib.size() - 1] << 20, 0, start, start + kPage});
    }
    return made;
  }();
  return *all;
}

int current_number() { return current_device; }
Device& current() { return devices()[current_device]; }

// --- memory ---------------------------------------------------------------------------------------------------------

static std::map<char*, std::pair<int, size_t>>& allocations() {
  static auto* all = new std::map<char*, std::pair<int, size_t>>;
  return *all;
}

bool take(Device& device, size_t size) {
  std::lock_guard guard(mutex);
  if (device.used + size > device.total) {
    note("out of memory", "", size);
    return false;
  }
  device.used += size;
  return true;
}

char* reserve(size_t size) {
  std::lock_guard guard(mutex);
  char* pointer = current().next;
  current().next += (size + kPage - 1) / kPage * kPage;  // no address is used twice
  return pointer;
}

char* allocate(size_t size) {
  std::lock_guard guard(mutex);
  if (!take(current(), size)) return nullptr;
  char* pointer = reserve(size);
  allocations()[pointer] = {current_device, size};
  note("allocation", "", size);
  return pointer;
}

bool release(void* pointer) {
  std::lock_guard guard(mutex);
  auto found = allocations().find(static_cast<char*>(pointer));
  if (found == allocations().end()) return false;
  devices()[found->second.first].used -= found->second.second;
  allocations().erase(found);
  return true;
}

int device_of(const void* pointer) {
  auto* address = static_cast<const char*>(pointer);
  for (size_t i = 0; i < devices().size(); i++)
    if (address >= devices()[i].memory && address < devices()[i].memory + kAddresses) return int(i);
  return -1;
}

// --- counts ---------------------------------------------------------------------------------------------------------

struct Count {
  long times = 0;
  double amount = 0;
};
static std::map<std::pair<std::string, std::string>, Count>& counts() {
  static auto* all = new std::map<std::pair<std::string, std::string>, Count>;
  return *all;
}

void note(const std::string& kind, const std::string& what, double amount) {
  std::lock_guard guard(mutex);
  Count& count = counts()[{kind, what}];
  count.times++;
  count.amount += amount;
}

void missing(const std::string& what) {
  note("not implemented", what);
  fprintf(stderr, "null GPU: not implemented: %s\n", what.c_str());
}

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace null_gpu

using namespace null_gpu;

// --- for the tests --------------------------------------------------------------------------------------------------

EXPORT void null_gpu_reset() {
  std::lock_guard guard(mutex);
  counts().clear();
}

// Return lines of kind, what, times and amount, separated by tabs. The text stays until the next call.
EXPORT const char* null_gpu_counts() {
  std::lock_guard guard(mutex);
  static std::string text;
  std::ostringstream lines;
  lines.precision(17);
  for (auto& [key, count] : counts())
    lines << key.first << '\t' << key.second << '\t' << count.times << '\t' << count.amount << '\n';
  text = lines.str();
  return text.c_str();
}

EXPORT void null_gpu_set_memory(int device, size_t bytes) { devices()[device].total = bytes; }
EXPORT size_t null_gpu_used_memory(int device) { return devices()[device].used; }

// What the linker adds for functions that are not written here.
EXPORT int null_gpu_not_implemented(const char* name, int status) {
  missing(name);
  return status;
}

// --- devices and errors ---------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = int(devices().size());
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= int(devices().size())) return failed(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
static std::atomic<bool> failing{false};
bool null_gpu::is_failing() { return failing; }
EXPORT void null_gpu_set_failing(int value) { failing = value; }

EXPORT cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing stream";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported: return "operation not supported (by the null GPU)";
    default: return "another error (of the null GPU)";
  }
}
EXPORT const char* cudaGetErrorName(cudaError_t error) {
  static thread_local std::string name;
  name = "cudaError " + std::to_string(int(error));
  return name.c_str();
}
