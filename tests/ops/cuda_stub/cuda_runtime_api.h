// What kernels/cuda/gpu.cpp uses of the CUDA runtime, for a test without CUDA: every call asks the test for its result.
// As in the real one, an error stays until cudaGetLastError() takes it.
#pragma once

#include <cstddef>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidResourceHandle = 400 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
constexpr int cudaSharedmemCarveoutMaxShared = 100;
using cudaStream_t = void*;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// the result of a call of the runtime; early: of a launch, whether it may start early
cudaError_t answer(const char* call, bool early = false);

inline cudaError_t cudaGetLastError() { return answer("cudaGetLastError"); }
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorInvalidResourceHandle ? "invalid resource handle" : "invalid argument";
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 132 : 232448;
  return answer("cudaDeviceGetAttribute");
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return answer("cudaDriverGetVersion");
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
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return answer("cudaLaunchKernelExC", config->numAttrs > 0);
}
