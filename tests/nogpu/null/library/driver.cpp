// CUDA's driver, as far as Triton, Inductor and torch's allocator call it.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "gpu.hpp"

using namespace null_gpu;

static CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }  // the numbers are the same
static CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(size_t(device) + 1); }

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { return as_driver(cudaDriverGetVersion(version)); }
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

// --- devices and contexts -------------------------------------------------------------------------------------------

EXPORT CUresult cuDeviceGetCount(int* count) { return as_driver(cudaGetDeviceCount(count)); }
EXPORT CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return number < int(devices().size()) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  bool is_of_transfers = attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ||
                         attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
  if (is_of_transfers) {  // between machines: there are none
    *value = 0;
    return CUDA_SUCCESS;
  }
  return as_driver(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_number());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  return context ? as_driver(cudaSetDevice(int(reinterpret_cast<size_t>(context)) - 1)) : CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_number();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  if (device_of(reinterpret_cast<void*>(pointer)) < 0) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(value) = pointer;
  return CUDA_SUCCESS;
}

// --- kernels --------------------------------------------------------------------------------------------------------

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(malloc(1));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
EXPORT CUresult cuModuleUnload(CUmodule module) {
  free(module);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(strdup(name));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = 0;  // such as spilled bytes
  if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = 64;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = 1024;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, CUstream stream) {
  return as_driver(submit(stream, "launch", reinterpret_cast<const char*>(function)));
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, CUstream stream, void**, void**) {
  return launch(function, stream);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return launch(function, config->hStream);
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                                          unsigned, unsigned, CUstream stream, void**) {
  return launch(function, stream);
}

// --- memory without and with an address: torch's expandable segments ------------------------------------------------
//
// Not refused while a graph is recorded: torch calls these functions then, without a relaxed capture mode.

EXPORT CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *size = 2 << 20;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* wanted,
                            unsigned long long) {
  int device = wanted->location.id;
  if (!take(devices()[device], size)) return CUDA_ERROR_OUT_OF_MEMORY;
  note("allocation", "", double(size));
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new std::pair<int, size_t>(device, size));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard guard(mutex);
  auto* memory = reinterpret_cast<std::pair<int, size_t>*>(handle);
  devices()[memory->first].used -= memory->second;
  delete memory;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *pointer = reinterpret_cast<CUdeviceptr>(reserve(size));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
