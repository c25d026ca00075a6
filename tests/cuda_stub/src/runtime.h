/* CUDA's runtime API and what its implementation shares over files. */
#pragma once

#include <cuda_runtime_api.h>

/* device.c: makes `error` what cudaGetLastError returns, and returns it. */
cudaError_t stub_error(cudaError_t error);
int stub_attribute(int attribute);
