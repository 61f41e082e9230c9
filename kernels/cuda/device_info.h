// What `nasfast doctor` asks about the GPU; plain C++, so that module.cpp needs no CUDA header.
#pragma once

#include <string>

namespace nasfast::cuda {

struct DeviceInfo {
  int count = 0;              // GPUs the driver offers; 0 without a driver
  bool kernels_run = false;   // a compiled image fits the current GPU
  int binary_version = 0;     // of that image: 10 * major + minor
  std::string error;          // empty when every question could be asked
};

// Never throws and needs no driver: the CUDA runtime is linked statically and looks for the driver when called.
DeviceInfo device_info();

}  // namespace nasfast::cuda
