// How functions are marked that both nvcc and a C++ compiler build.
#pragma once

#ifdef __CUDACC__
#define NASFAST_DEVICE __device__ __forceinline__
#define NASFAST_ANYWHERE __host__ __device__ __forceinline__
#define NASFAST_UNROLL _Pragma("unroll")
#define NASFAST_UNROLL_4 _Pragma("unroll 4")
#define NASFAST_NO_UNROLL _Pragma("unroll 1")
#else
#define NASFAST_DEVICE inline
#define NASFAST_ANYWHERE inline
#define NASFAST_UNROLL
#define NASFAST_UNROLL_4
#define NASFAST_NO_UNROLL
#endif
