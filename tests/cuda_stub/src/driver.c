/*
 * Driver API, as Triton's launcher and torch's NVRTC loader use it.
 *
 * The whole stub is one library that calls itself libcuda.so.1, so that whoever opens the driver by
 * that name gets it. cuda.h maps names to their newest versions (cuCtxPushCurrent_v2).
 */
#define _GNU_SOURCE
#include "stub.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern int stub_attribute(int attribute);

#define CONTEXT ((CUcontext)0x77) /* never followed */

struct function {
    char name[512];
};

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) ANSWER(version, CUDA_VERSION)
CUresult cuDeviceGet(CUdevice *device, int ordinal) ANSWER(device, 0)
CUresult cuDeviceGetCount(int *count) ANSWER(count, 1)

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    snprintf(name, size, DEVICE_NAME);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) ANSWER(bytes, stub_total_memory())

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = stub_attribute((int)attribute);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_INVALID_VALUE   ? "invalid argument"
            : error == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported by the CUDA stub"
                                                : "error of the CUDA stub";
    return CUDA_SUCCESS;
}

/* The driver's messages for the log: none comes. */
CUresult cuLogsRegisterCallback(CUlogsCallback callback, void *data, CUlogsCallbackHandle *handle) {
    if (handle)
        *handle = NULL;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

/* Contexts: there is one. */

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) ANSWER(context, CONTEXT)
CUresult cuCtxGetCurrent(CUcontext *context) ANSWER(context, CONTEXT)
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext *context) ANSWER(context, CONTEXT)
CUresult cuCtxGetDevice(CUdevice *device) ANSWER(device, 0)
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) ANSWER(value, 1 << 20)
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

/* Modules and functions: a function is its name. */

CUresult cuModuleLoadData(CUmodule *module, const void *image) ANSWER(module, (CUmodule)malloc(1))

CUresult cuModuleLoad(CUmodule *module, const char *file) {
    return cuModuleLoadData(module, file);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned num_options,
                            CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module, const char *name) {
    struct function *function = calloc(1, sizeof *function);
    snprintf(function->name, sizeof function->name, "%s", name);
    *handle = (CUfunction)function;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = MAX_THREADS_PER_BLOCK; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 64; break;
    default: *value = 0; /* no spills, no static shared memory */
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    int too_large = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES &&
                    value > SHARED_PER_BLOCK_OPTIN;
    return too_large ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                     size_t shared) {
    *blocks = threads ? MAX_THREADS_PER_MULTIPROCESSOR / threads : 1;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function,
                                      const CUlaunchConfig *config) {
    *clusters = MULTIPROCESSORS;
    return CUDA_SUCCESS;
}

/* A device pointer of the runtime is one of the driver. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        return stub_unknown("cuPointerGetAttribute (other than the pointer)",
                            CUDA_ERROR_NOT_SUPPORTED);
    *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}

/* Launches. */

static CUresult launch(CUfunction function, const unsigned grid[3], const unsigned block[3],
                       unsigned shared, CUstream stream) {
    struct stub_launch call = {.name = ((struct function *)function)->name,
                               .grid = {grid[0], grid[1], grid[2]},
                               .block = {block[0], block[1], block[2]},
                               .shared = shared,
                               .stream = stream};
    return stub_launch(&call) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void **arguments, void **extra) {
    unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return launch(function, grid, block, shared, stream);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                   unsigned grid_z, unsigned block_x, unsigned block_y,
                                   unsigned block_z, unsigned shared, CUstream stream,
                                   void **arguments) {
    unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return launch(function, grid, block, shared, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                          void **extra) {
    unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    unsigned block[] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    return launch(function, grid, block, config->sharedMemBytes, config->hStream);
}

/* Symbols by name: the newest version that the library has. Those it lacks fail when called. */

static void *find_symbol(const char *name) {
    char versioned[256];
    for (int version = 3; version > 1; version--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
        void *found = dlsym(RTLD_DEFAULT, versioned);
        if (found)
            return found;
    }
    return dlsym(RTLD_DEFAULT, name);
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    *function = find_symbol(name);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* The runtime's doors to the same, declared here because their types belong to the runtime. */

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                            int *status) {
    *function = find_symbol(name);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? 0 : 500; /* cudaErrorSymbolNotFound */
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                     unsigned long long flags, int *status) {
    return cudaGetDriverEntryPoint(name, function, flags, status);
}
