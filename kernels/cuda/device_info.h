// What `nasfast doctor` reports about a GPU. Plain C++, so that information.cpp needs no CUDA header.
#pragma once

#include <string>

namespace nasfast::cuda {

struct DeviceInfo {
  int count = 0;             // GPUs that the driver offers; 0 without a driver
  bool kernels_run = false;  // whether a compiled image fits this GPU
  int binary_version = 0;    // version of that image: 10 * major + minor
  int ptx_version = 0;       // of the PTX from which it was made, here or by the driver
  bool old_driver = false;   // whether the driver is older than the toolkit of this build
  std::string error;         // empty when every call of CUDA succeeded
};

// Never throws and needs no driver: the CUDA runtime is linked statically and looks for the driver when it is called.
DeviceInfo device_info(int device);

}  // namespace nasfast::cuda
