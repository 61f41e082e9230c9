// Measures the constants of benchmarks/gpu_model: launches with and without an early start, alone and in a graph, the
// rates of the instructions that the kernels live on, a barrier of the whole grid, and copies. Prints lines of JSON.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                          \
  do {                                                                       \
    const cudaError_t status = (call);                                       \
    if (status != cudaSuccess) {                                             \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));   \
      std::exit(1);                                                          \
    }                                                                        \
  } while (false)

__global__ void empty_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

constexpr int kTimes = 4096;

// 4 products of 16 x 8 x kDepth a turn, which do not wait for each other
template <int kDepth>
__global__ void products(float* out) {
  float d[4][4] = {};
  uint32_t a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x, 5};
#pragma unroll 1
  for (int i = 0; i < kTimes; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kDepth == 16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
      } else {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
                     : "r"(a[0]), "r"(a[1]), "r"(b[0]));
      }
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = d[0][0] + d[1][1] + d[2][2] + d[3][3];
}

__global__ void transposes(uint32_t* out) {
  uint32_t p[4] = {threadIdx.x, 1, 2, 3};
#pragma unroll 1
  for (int i = 0; i < kTimes; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(p[j]));
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = p[0] ^ p[1] ^ p[2] ^ p[3];
}

__global__ void matrix_loads(uint32_t* out) {
  __shared__ uint4 memory[512];
  for (unsigned i = threadIdx.x; i < 512; i += blockDim.x) memory[i] = make_uint4(i, i, i, i);
  __syncthreads();
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(memory + threadIdx.x % 32));
  uint32_t sum = 0;
#pragma unroll 1
  for (int i = 0; i < kTimes; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t r[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(at + 512 * j));
      sum ^= r[0] ^ r[1] ^ r[2] ^ r[3];
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__global__ void barriers(int count) {
  const auto grid = cooperative_groups::this_grid();
  for (int i = 0; i < count; ++i) grid.sync();
}

// the least milliseconds of several runs
template <class Work>
float best(cudaStream_t stream, const Work& work) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float least = 1e30f;
  for (int i = 0; i < 12; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    work();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    least = std::min(least, ms);
  }
  return least;
}

void launch_empty(cudaStream_t stream, int count, bool early, int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  for (int i = 0; i < count; ++i) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(128);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early && i > 0 ? 1 : 0;
    CHECK(cudaLaunchKernelEx(&config, empty_kernel));
  }
}

cudaGraphExec_t captured(cudaStream_t stream, int count, bool early, int blocks) {
  cudaGraph_t graph;
  cudaGraphExec_t made;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch_empty(stream, count, early, blocks);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&made, graph, 0));
  return made;
}

int main() {
  cudaDeviceProp gpu{};
  CHECK(cudaGetDeviceProperties(&gpu, 0));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  const int sms = gpu.multiProcessorCount, count = 200;
  for (const bool early : {false, true}) {
    const char* const how = early ? "early" : "plain";
    const float alone = best(stream, [&] { launch_empty(stream, count, early, sms); });
    std::printf("{\"what\": \"empty launch, %s\", \"us\": %.3f}\n", how, 1e3 * alone / count);
    const auto together = captured(stream, count, early, sms);
    const float within = best(stream, [&] { CHECK(cudaGraphLaunch(together, stream)); });
    std::printf("{\"what\": \"empty launch in a graph, %s\", \"us\": %.3f}\n", how, 1e3 * within / count);
    // graphs of 4 launches, one behind the other, as the engine replays them
    const auto part = captured(stream, 4, early, sms);
    const float graphs = best(stream, [&] {
      for (int i = 0; i < count / 4; ++i) CHECK(cudaGraphLaunch(part, stream));
    });
    std::printf("{\"what\": \"graph of 4 empty launches, %s\", \"us\": %.3f}\n", how, 1e3 * graphs / (count / 4));
  }
  const int blocks = 2 * sms, threads = 512;
  void* out = nullptr;
  CHECK(cudaMalloc(&out, sizeof(float) * blocks * threads));
  // of a quarter of a multiprocessor: warps of both blocks, and the instructions of each
  const double each = 2.0 * threads / 32 / 4 * 4 * kTimes;
  int khz = 0;
  CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  const auto rate = [&](const char* what, float ms) {
    std::printf("{\"what\": \"%s\", \"ns\": %.4f, \"cycles_at_most_clock\": %.3f}\n", what, 1e6 * ms / each,
                1e6 * ms / each * khz / 1e6);
  };
  rate("m16n8k16", best(stream, [&] { products<16><<<blocks, threads, 0, stream>>>(static_cast<float*>(out)); }));
  rate("m16n8k8", best(stream, [&] { products<8><<<blocks, threads, 0, stream>>>(static_cast<float*>(out)); }));
  rate("movmatrix", best(stream, [&] { transposes<<<blocks, threads, 0, stream>>>(static_cast<uint32_t*>(out)); }));
  rate("ldmatrix.x4", best(stream, [&] { matrix_loads<<<blocks, threads, 0, stream>>>(static_cast<uint32_t*>(out)); }));
  CHECK(cudaGetLastError());
  int syncs = 100;
  void* arguments[] = {&syncs};
  const float grid = best(stream, [&] {
    CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(barriers), dim3(sms), dim3(256), arguments, 0, stream));
  });
  std::printf("{\"what\": \"barrier of the grid\", \"us\": %.3f}\n", 1e3 * grid / syncs);
  for (const size_t mebibytes : {16, 64, 1024}) {
    const size_t bytes = mebibytes << 20;
    void *from = nullptr, *to = nullptr;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    const float ms = best(stream, [&] { CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream)); });
    std::printf("{\"what\": \"copy of %zu MiB\", \"GB_per_s\": %.1f}\n", mebibytes, 2e-6 * bytes / ms);
    CHECK(cudaFree(from));
    CHECK(cudaFree(to));
  }
}
