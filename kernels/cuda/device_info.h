// What `nasfast doctor` reports about the GPU. Plain C++, so that module.cpp needs no CUDA header.
#pragma once

#include <string>

namespace nasfast::cuda {

struct DeviceInfo {
  int count = 0;             // GPUs that the driver offers; 0 without a driver
  bool kernels_run = false;  // whether a compiled image fits the current GPU
  int binary_version = 0;    // version of that image: 10 * major + minor
  std::string error;         // empty when every call of CUDA succeeded
};

// Never throws and needs no driver: the CUDA runtime is linked statically and looks for the driver when it is called.
DeviceInfo device_info();

}  // namespace nasfast::cuda
