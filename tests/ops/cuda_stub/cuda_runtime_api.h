// What kernels/cuda/gpu.cpp uses of the CUDA runtime, for a test without CUDA: every call asks the test for its result.
// As in the real one, an error stays until cudaGetLastError() takes it.
#pragma once

#include <cstddef>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
constexpr int cudaSharedmemCarveoutMaxShared = 100;
using cudaStream_t = void*;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// the result of a call of the runtime
cudaError_t answer(const char* call);

inline cudaError_t cudaGetLastError() { return answer("cudaGetLastError"); }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 132 : 232448;
  return answer("cudaDeviceGetAttribute");
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return answer("cudaGetDevice");
}
inline cudaError_t cudaSetDevice(int) { return answer("cudaSetDevice"); }
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return answer("cudaFuncSetAttribute"); }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return answer("cudaStreamIsCapturing");
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return answer("cudaStreamSynchronize"); }
inline cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return answer("cudaLaunchKernel");
}
