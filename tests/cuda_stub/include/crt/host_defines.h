/* The words that CUDA's headers put before declarations: nvcc brings them, the wheels do not. */
#pragma once

#define __align__(n) __attribute__((aligned(n)))
#define __annotate__(a)
#define __builtin_align__(n) __align__(n)
#define __constant__
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __global__
#define __host__
#define __location__(a)
#define __managed__
#define __shared__
#define __specialization_static static
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __CUDA_ARCH_HAS_FEATURE__(feature) 0
