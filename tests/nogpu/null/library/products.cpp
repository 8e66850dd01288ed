// cuBLAS: handles with their stream, and matrix products that are counted by the types of their operands.
#include <cublasLt.h>
#include <cublas_v2.h>

#include "gpu.hpp"

using namespace null_gpu;

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

static std::string name_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_32F: return "float32";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_16F: return "float16";
    case CUDA_R_64F: return "float64";
    case CUDA_R_8I: return "int8";
    case CUDA_R_32I: return "int32";
    default: return "type " + std::to_string(int(type));
  }
}

static cublasStatus_t product(cudaStream_t stream, const std::string& types, double operations) {
  auto error = submit(stream, "product", types, operations);
  return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
static std::string types(cudaDataType operand, cudaDataType result) {
  return operand == result ? name_of(operand) : name_of(operand) + " to " + name_of(result);
}

// --- handles --------------------------------------------------------------------------------------------------------

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = handle->pointers;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }

// --- products -------------------------------------------------------------------------------------------------------

EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                   const void*, const void*, cudaDataType a, int, const void*, cudaDataType, int,
                                   const void*, void*, cudaDataType c, int, cublasComputeType_t, cublasGemmAlgo_t) {
  return product(handle->stream, types(a, c), 2.0 * m * n * k);
}
EXPORT cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                                                 int n, int k, const void*, const void*, cudaDataType a, int,
                                                 long long, const void*, cudaDataType, int, long long, const void*,
                                                 void*, cudaDataType c, int, long long, int batch,
                                                 cublasComputeType_t, cublasGemmAlgo_t) {
  return product(handle->stream, types(a, c), 2.0 * m * n * k * batch);
}
EXPORT cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                     const float*, const float*, int, const float*, int, const float*, float*, int) {
  return product(handle->stream, "float32", 2.0 * m * n * k);
}
EXPORT cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                    const float*, const void*, cudaDataType a, int, const void*, cudaDataType, int,
                                    const float*, void*, cudaDataType c, int) {
  return product(handle->stream, types(a, c), 2.0 * m * n * k);
}
EXPORT cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                                                int n, int k, const float*, const float*, int, long long, const float*,
                                                int, long long, const float*, float*, int, long long, int batch) {
  return product(handle->stream, "float32", 2.0 * m * n * k * batch);
}
EXPORT cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const float*, const float*,
                                     int, const float*, int, const float*, float*, int) {
  return product(handle->stream, "float32", 2.0 * m * n);
}

// --- cublasLt -------------------------------------------------------------------------------------------------------

struct Layout {
  cudaDataType type;
};

EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t, cudaDataType_t) {
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  delete reinterpret_cast<char*>(made);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*,
                                                     size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t, uint64_t,
                                                 int64_t) {
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type});
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  delete reinterpret_cast<Layout*>(made);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                                       const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  delete reinterpret_cast<char*>(made);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                           cublasLtMatmulPreferenceAttributes_t, const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                     cublasLtMatmulHeuristicResult_t found[], int* count) {
  found[0] = {}, *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                                     cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t, const void*,
                                     const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t d,
                                     const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  auto type = [](cublasLtMatrixLayout_t layout) { return reinterpret_cast<Layout*>(layout)->type; };
  return product(stream, types(type(a), type(d)), 0);
}
