/* Runtime API: kernels by name, their launches, the limits of a launch, occupancy. */
#define _GNU_SOURCE
#include "stub.h"
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Kernels by the address of their host function, in a hash table with open addressing. */
#define TABLE (1u << 20)
struct kernel {
    const void *function;
    const char *name; /* mangled */
    size_t shared_limit;
};
static struct kernel table[TABLE];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct kernel *find(const void *function) {
    unsigned i = (unsigned)(((uintptr_t)function >> 4) * 2654435761u) % TABLE;
    while (table[i].function && table[i].function != function)
        i = (i + 1) % TABLE;
    return &table[i];
}

/* What nvcc's start-up code calls for each module, kernel and variable. */
void **__cudaRegisterFatBinary(void *binary) { return malloc(sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **module) {}
void __cudaUnregisterFatBinary(void **module) {}
char __cudaInitModule(void **module) { return 1; }
void __cudaRegisterVar(void **module, char *host, char *address, const char *name, int ext,
                       size_t size, int constant, int global) {}

void __cudaRegisterFunction(void **module, const char *function, char *device_function,
                            const char *name, int threads, uint3 *thread, uint3 *block,
                            dim3 *block_dim, dim3 *grid_dim, int *warp_size) {
    pthread_mutex_lock(&lock);
    struct kernel *kernel = find(function);
    kernel->function = function;
    kernel->name = name;
    kernel->shared_limit = SHARED_PER_BLOCK;
    pthread_mutex_unlock(&lock);
}

/* The <<<...>>> syntax leaves its configuration here for the kernel's host function. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

static int dimensions_fit(const struct stub_launch *launch) {
    const unsigned *grid = launch->grid, *block = launch->block;
    unsigned long long threads = 1;
    for (int i = 0; i < 3; i++) {
        if (!grid[i] || !block[i] || block[i] > MAX_THREADS_PER_BLOCK)
            return 0;
        threads *= block[i];
    }
    return grid[0] <= MAX_GRID_X && grid[1] <= MAX_GRID_YZ && grid[2] <= MAX_GRID_YZ &&
           block[2] <= MAX_BLOCK_Z && threads <= MAX_THREADS_PER_BLOCK;
}

int stub_launch(const struct stub_launch *launch) {
    const unsigned *grid = launch->grid, *block = launch->block;
    int fits = dimensions_fit(launch) && launch->shared <= SHARED_PER_BLOCK_OPTIN;

    stub_record(fits ? "launch" : "refused", launch->stream, "%u\t%u\t%u\t%u\t%u\t%u\t%zu\t%s",
                grid[0], grid[1], grid[2], block[0], block[1], block[2], launch->shared,
                launch->name);
    return fits ? 0 : 1;
}

static cudaError_t launch(const void *function, dim3 grid, dim3 block, size_t shared,
                          cudaStream_t stream) {
    struct kernel *kernel = find(function);
    if (!kernel->function)
        return stub_error(cudaErrorInvalidDeviceFunction);

    struct stub_launch call = {.name = kernel->name,
                               .grid = {grid.x, grid.y, grid.z},
                               .block = {block.x, block.y, block.z},
                               .shared = shared,
                               .stream = stream};
    if (shared > kernel->shared_limit)
        call.shared = SIZE_MAX; /* more than cudaFuncSetAttribute asked for: refused */
    return stub_error(stub_launch(&call) ? cudaErrorInvalidConfiguration : cudaSuccess);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream) {
    return launch(function, grid, block, shared, stream);
}

/* What nvcc 13 compiles <<<...>>> to: a kernel's handle is the address of its host function. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return find(function)->function ? cudaSuccess : stub_error(cudaErrorInvalidDeviceFunction);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t stream) {
    return launch(kernel, grid, block, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block,
                                        void **arguments, size_t shared, cudaStream_t stream) {
    return launch(function, grid, block, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **arguments) {
    return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                  config->stream);
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute,
                                 int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > SHARED_PER_BLOCK_OPTIN)
            return stub_error(cudaErrorInvalidValue);
        find(function)->shared_limit = value;
    }
    return cudaSuccess;
}

/* Registers and static shared memory are not read from the binary: a kernel of 64 registers. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = MAX_THREADS_PER_BLOCK;
    attributes->numRegs = 64;
    attributes->binaryVersion = attributes->ptxVersion = 10 * COMPUTE_MAJOR + COMPUTE_MINOR;
    attributes->maxDynamicSharedSizeBytes = SHARED_PER_BLOCK_OPTIN;
    return cudaSuccess;
}

/* By threads and shared memory alone. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *function,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
    *blocks = threads ? MAX_THREADS_PER_MULTIPROCESSOR / threads : 1;
    if (shared && (size_t)*blocks > SHARED_PER_MULTIPROCESSOR / shared)
        *blocks = SHARED_PER_MULTIPROCESSOR / shared;
    if (*blocks > MAX_BLOCKS_PER_MULTIPROCESSOR)
        *blocks = MAX_BLOCKS_PER_MULTIPROCESSOR;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                          int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
                                                                  shared, 0);
}
