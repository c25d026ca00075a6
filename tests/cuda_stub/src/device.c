/* Runtime API: the device's properties, versions, errors. */
#include "stub.h"
#include "runtime.h"

#include <stdio.h>
#include <string.h>

static __thread cudaError_t last_error;

cudaError_t stub_error(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaError";
    }
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNotSupported: return "operation not supported by the CUDA stub";
    default: return "error of the CUDA stub";
    }
}

cudaError_t cudaDriverGetVersion(int *version) ANSWER(version, CUDART_VERSION)
cudaError_t cudaRuntimeGetVersion(int *version) ANSWER(version, CUDART_VERSION)
cudaError_t cudaGetDeviceCount(int *count) ANSWER(count, 1)
cudaError_t cudaGetDevice(int *device) ANSWER(device, 0)

cudaError_t cudaSetDevice(int device) {
    return stub_error(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) ANSWER(can, 0)

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, DEVICE_NAME);
    properties->major = COMPUTE_MAJOR;
    properties->minor = COMPUTE_MINOR;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->totalGlobalMem = stub_total_memory();
    properties->warpSize = WARP;

    properties->maxThreadsPerBlock = MAX_THREADS_PER_BLOCK;
    properties->maxThreadsPerMultiProcessor = MAX_THREADS_PER_MULTIPROCESSOR;
    properties->maxBlocksPerMultiProcessor = MAX_BLOCKS_PER_MULTIPROCESSOR;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = MAX_THREADS_PER_BLOCK;
    properties->maxThreadsDim[2] = MAX_BLOCK_Z;
    properties->maxGridSize[0] = MAX_GRID_X;
    properties->maxGridSize[1] = properties->maxGridSize[2] = MAX_GRID_YZ;

    properties->sharedMemPerBlock = SHARED_PER_BLOCK;
    properties->sharedMemPerBlockOptin = SHARED_PER_BLOCK_OPTIN;
    properties->sharedMemPerMultiprocessor = SHARED_PER_MULTIPROCESSOR;
    properties->regsPerBlock = properties->regsPerMultiprocessor = REGISTERS;
    properties->l2CacheSize = L2_BYTES;
    properties->memoryBusWidth = BUS_BITS;
    properties->textureAlignment = 512;

    properties->unifiedAddressing = 1;
    properties->concurrentKernels = 1;
    properties->asyncEngineCount = 3;
    properties->canMapHostMemory = 1;
    properties->cooperativeLaunch = 1;
    properties->streamPrioritiesSupported = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    /* Runtime and driver number the attributes alike. */
    *value = stub_attribute((int)attribute);
    return cudaSuccess;
}

int stub_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return MAX_THREADS_PER_BLOCK;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return MAX_THREADS_PER_BLOCK;
    case cudaDevAttrMaxBlockDimZ: return MAX_BLOCK_Z;
    case cudaDevAttrMaxGridDimX: return MAX_GRID_X;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return MAX_GRID_YZ;
    case cudaDevAttrMaxSharedMemoryPerBlock: return SHARED_PER_BLOCK;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_PER_BLOCK_OPTIN;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return SHARED_PER_MULTIPROCESSOR;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return REGISTERS;
    case cudaDevAttrWarpSize: return WARP;
    case cudaDevAttrClockRate: return CLOCK_KHZ;
    case cudaDevAttrMemoryClockRate: return MEMORY_CLOCK_KHZ;
    case cudaDevAttrGlobalMemoryBusWidth: return BUS_BITS;
    case cudaDevAttrL2CacheSize: return L2_BYTES;
    case cudaDevAttrMultiProcessorCount: return MULTIPROCESSORS;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return MAX_THREADS_PER_MULTIPROCESSOR;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return MAX_BLOCKS_PER_MULTIPROCESSOR;
    case cudaDevAttrComputeCapabilityMajor: return COMPUTE_MAJOR;
    case cudaDevAttrComputeCapabilityMinor: return COMPUTE_MINOR;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrAsyncEngineCount: return 3;
    default: return 0; /* an optional ability that this device does not have */
    }
}
