// Memory, copies and the properties of devices. Copies move no data: what the host reads from a device is zeros.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "gpu.hpp"

using namespace null_gpu;

static std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

bool null_gpu::is_pinned(const void* pointer) {
  std::lock_guard guard(mutex);
  auto* address = static_cast<const char*>(pointer);
  auto found = pinned().upper_bound(address);
  if (found == pinned().begin()) return false;
  --found;
  return address < found->first + found->second;
}

// --- allocation -----------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (auto error = refuse_while_recording("cudaMalloc")) return error;
  *pointer = allocate(size);
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  if (auto error = refuse_while_recording("cudaFree")) return error;
  note("wait", "cudaFree");  // it synchronizes the device
  return release(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  if (auto error = refuse_while_recording("cudaHostAlloc")) return error;
  std::lock_guard guard(mutex);
  *pointer = aligned_alloc(4096, (size + 4095) & ~4095ull);
  if (!*pointer) return failed(cudaErrorMemoryAllocation);
  pinned()[static_cast<char*>(*pointer)] = size;
  note("pinned allocation", "", size);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* pointer) {
  if (auto error = refuse_while_recording("cudaFreeHost")) return error;
  std::lock_guard guard(mutex);
  if (!pinned().erase(static_cast<char*>(pointer))) return failed(cudaErrorInvalidValue);
  free(pointer);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  std::lock_guard guard(mutex);
  pinned()[static_cast<char*>(pointer)] = size;
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard guard(mutex);
  return pinned().erase(static_cast<char*>(pointer)) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *total = current().total;
  *available = current().total > current().used ? current().total - current().used : 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  int device = device_of(pointer);
  found->type = device >= 0            ? cudaMemoryTypeDevice
                : is_pinned(pointer) ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
  found->device = device >= 0 ? device : current_number();
  found->devicePointer = const_cast<void*>(pointer);
  found->hostPointer = device >= 0 ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  *pointer = current().memory;  // the first page is for variables of device code
  return cudaSuccess;
}

// --- copies ---------------------------------------------------------------------------------------------------------

static std::string kind_of(const void* to, const void* from) {
  bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
  if (to_device && from_device) return device_of(to) == device_of(from) ? "within the device" : "between devices";
  if (!to_device && !from_device) return "within the host";
  std::string memory = is_pinned(to_device ? from : to) ? "pinned" : "pageable";
  return memory + (to_device ? " to the device" : " to the host");
}

static cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream) {
  std::string kind = kind_of(to, from);
  if (kind == "within the host") memmove(to, from, size);
  if (device_of(to) < 0 && device_of(from) >= 0) memset(to, 0, size);
  // The host waits for a copy of pageable memory (CUDA Runtime API, "API synchronization behavior").
  if (kind.rfind("pageable", 0) == 0) note("wait", "copy of " + kind);
  return submit(stream, "copy", kind, size);
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, size, stream);
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (auto error = refuse_while_recording("cudaMemcpy")) return error;
  note("wait", "cudaMemcpy");
  return copy(to, from, size, nullptr);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t, const void* from, size_t, size_t width, size_t height,
                                     cudaMemcpyKind, cudaStream_t stream) {
  if (device_of(to) < 0 || device_of(from) < 0) return failed(cudaErrorNotSupported);
  return submit(stream, "copy", kind_of(to, from), width * height);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t size, cudaStream_t stream) {
  return submit(stream, "copy", "between devices", size);
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  if (auto error = refuse_while_recording("cudaMemcpyToSymbol")) return error;
  note("wait", "cudaMemcpyToSymbol");
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void*, int, size_t size, cudaStream_t stream) {
  return submit(stream, "memset", "", size);
}
EXPORT cudaError_t cudaMemset(void*, int, size_t size) {
  if (auto error = refuse_while_recording("cudaMemset")) return error;
  return submit(nullptr, "memset", "", size);
}

// --- properties -----------------------------------------------------------------------------------------------------

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
static size_t shared_bytes(int capability) {
  if (capability == 90 || capability == 100 || capability == 103) return 227 << 10;
  return capability == 80 ? 163 << 10 : 99 << 10;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int number) {
  if (number < 0 || number >= int(devices().size())) return failed(cudaErrorInvalidDevice);
  const Device& device = devices()[number];
  int capability = device.capability;
  bool is_server = capability == 80 || capability == 90 || capability == 100 || capability == 103;
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "Null GPU %d.%d", capability / 10, capability % 10);
  memset(found->uuid.bytes, number + 1, sizeof found->uuid.bytes);
  found->major = capability / 10, found->minor = capability % 10;
  found->totalGlobalMem = device.total;
  found->multiProcessorCount = 132, found->warpSize = 32;
  found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = is_server ? 2048 : 1536;
  found->maxBlocksPerMultiProcessor = is_server ? 32 : 24;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = shared_bytes(capability);
  found->sharedMemPerMultiprocessor = shared_bytes(capability) + 1024, found->reservedSharedMemPerBlock = 1024;
  found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
  found->l2CacheSize = 50 << 20, found->totalConstMem = 65536, found->memoryBusWidth = 5120;
  found->textureAlignment = 512, found->texturePitchAlignment = 32;
  found->concurrentKernels = found->unifiedAddressing = found->canMapHostMemory = found->cooperativeLaunch = 1;
  found->asyncEngineCount = 3, found->streamPrioritiesSupported = 1, found->pciBusID = number + 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  cudaDeviceProp device;
  if (auto error = cudaGetDeviceProperties(&device, number)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = device.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(device.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(device.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(device.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxThreadsPerBlock: *value = device.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = device.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = device.regsPerBlock; break;
    case cudaDevAttrWarpSize: *value = device.warpSize; break;
    case cudaDevAttrMaxGridDimX: *value = device.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = device.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = device.maxGridSize[2]; break;
    case cudaDevAttrL2CacheSize: *value = device.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = device.memoryBusWidth; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrPageableMemoryAccess: case cudaDevAttrConcurrentManagedAccess: *value = 0; break;
    default:
      missing("device attribute " + std::to_string(int(attribute)));
      return failed(cudaErrorNotSupported);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int number) {
  snprintf(text, size, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
