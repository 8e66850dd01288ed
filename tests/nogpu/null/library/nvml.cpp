// NVML, as far as dualtune asks it. NULL_GPU_LOST=1 is the number of a card that has fallen off the bus.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gpu.hpp"

using namespace null_gpu;

enum { kSuccess = 0, kInvalid = 2, kNotSupported = 3, kLost = 15 };
struct Memory {
  unsigned long long total, free, used;
};

static int number_of(void* handle) { return int(reinterpret_cast<size_t>(handle)) - 1; }
static Device& device_of_handle(void* handle) { return devices()[number_of(handle)]; }
static int text(char* to, unsigned size, const char* format, int a, int b) {
  snprintf(to, size, format, a, b);
  return kSuccess;
}

EXPORT int nvmlInit_v2() { return kSuccess; }
EXPORT int nvmlInitWithFlags(unsigned) { return kSuccess; }
EXPORT int nvmlShutdown() { return kSuccess; }
EXPORT const char* nvmlErrorString(int error) {
  return error == kLost ? "GPU is lost" : error == kNotSupported ? "Not Supported" : "another error (of the null GPU)";
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return kSuccess;
}
EXPORT int nvmlSystemGetDriverVersion(char* to, unsigned size) { return text(to, size, "%d.%02d", 580, 0); }
EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = unsigned(devices().size());
  return kSuccess;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** handle) {
  const char* lost = getenv("NULL_GPU_LOST");
  if (number >= devices().size()) return kInvalid;
  if (lost && unsigned(atoi(lost)) == number) return kLost;
  *handle = reinterpret_cast<void*>(size_t(number) + 1);
  return kSuccess;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* place, void** handle) {
  unsigned domain, bus;  // the bus is the number of the card, plus one
  if (sscanf(place, "%x:%x", &domain, &bus) != 2 || !bus) return kInvalid;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}
EXPORT int nvmlDeviceGetName(void* handle, char* to, unsigned size) {
  int capability = device_of_handle(handle).capability;
  return text(to, size, "Null GPU %d.%d", capability / 10, capability % 10);
}
EXPORT int nvmlDeviceGetUUID(void* handle, char* to, unsigned size) {
  int byte = number_of(handle) + 1;
  return text(to, size, "GPU-%02x%02x", byte, byte);
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  *major = device_of_handle(handle).capability / 10, *minor = device_of_handle(handle).capability % 10;
  return kSuccess;
}
EXPORT int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  const Device& device = device_of_handle(handle);
  *memory = {device.total, device.total - device.used, device.used};
  return kSuccess;
}
EXPORT int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return kNotSupported; }
// No NVLink fabric: the structure keeps the caller's "not supported".
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kSuccess; }
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
