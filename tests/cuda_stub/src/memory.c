/*
 * Runtime API: device memory, pinned memory, copies.
 *
 * Device memory is an address range without pages until something is written to it, so 141 GB cost
 * nothing. Copies up to MAX_COPY bytes move their bytes; larger ones are recorded only.
 */
#define _GNU_SOURCE
#include "stub.h"
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_COPY (16u << 20)           /* between host and device */
#define MAX_COPY_ON_DEVICE (1u << 20) /* would make pages that nothing was copied into resident */
#define PAGE 4096u
#define MAX_REGIONS 65536

enum place { PAGEABLE, PINNED, DEVICE };
struct region {
    char *start;
    size_t size;
    enum place place;
};
static struct region regions[MAX_REGIONS];
static int num_regions;
static unsigned long long in_use;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

unsigned long long stub_total_memory(void) {
    const char *text = getenv("CUDA_STUB_MEMORY");
    return text && *text ? strtoull(text, NULL, 10) : DEVICE_MEMORY;
}

/* Adds a region, in the slot of one that is gone where there is one. Call with the lock held. */
static int add_region(void *start, size_t size, enum place place) {
    int i = 0;
    while (i < num_regions && regions[i].size)
        i++;
    if (i == MAX_REGIONS)
        return 0;

    if (i == num_regions)
        num_regions++;
    regions[i] = (struct region){start, size, place};
    return 1;
}

/* Removes the region that begins at `start`; returns its size, 0 if there is none. */
static size_t remove_region(const void *start, enum place place) {
    for (int i = 0; i < num_regions; i++) {
        if (regions[i].size && regions[i].start == start && regions[i].place == place) {
            size_t size = regions[i].size;
            regions[i].size = 0;
            return size;
        }
    }
    return 0;
}

static enum place place_of(const void *pointer) {
    enum place place = PAGEABLE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_regions; i++) {
        char *start = regions[i].start, *wanted = (char *)pointer;
        if (regions[i].size && wanted >= start && wanted < start + regions[i].size)
            place = regions[i].place;
    }
    pthread_mutex_unlock(&lock);
    return place;
}

static void *map(size_t size) {
    void *start = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static void *allocate(size_t size) {
    if (in_use + size > stub_total_memory())
        return NULL;

    void *start = map(size);
    if (start && !add_region(start, size, DEVICE)) {
        munmap(start, size + PAGE);
        return NULL;
    }
    in_use += start ? size : 0;
    return start;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    pthread_mutex_lock(&lock);
    *pointer = allocate(size);
    unsigned long long used = in_use;
    pthread_mutex_unlock(&lock);

    stub_record(*pointer ? "malloc" : "oom", NULL, "%zu\t%llu", size, used);
    return stub_error(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *pointer) {
    if (!pointer)
        return cudaSuccess;

    pthread_mutex_lock(&lock);
    size_t size = remove_region(pointer, DEVICE);
    in_use -= size;
    unsigned long long used = in_use;
    pthread_mutex_unlock(&lock);
    if (!size)
        return stub_error(cudaErrorInvalidValue);

    munmap(pointer, size + PAGE);
    stub_record("free", NULL, "%zu\t%llu", size, used);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = stub_total_memory();
    *available = *total > in_use ? *total - in_use : 0;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    *pointer = map(size);
    pthread_mutex_lock(&lock);
    int added = *pointer && add_region(*pointer, size, PINNED);
    pthread_mutex_unlock(&lock);

    stub_record("pinned", NULL, "%zu\t0", size);
    return stub_error(added ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *pointer) {
    pthread_mutex_lock(&lock);
    size_t size = remove_region(pointer, PINNED);
    pthread_mutex_unlock(&lock);

    if (size)
        munmap(pointer, size + PAGE);
    return stub_error(size ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    pthread_mutex_lock(&lock);
    int added = add_region(pointer, size, PINNED);
    pthread_mutex_unlock(&lock);
    return stub_error(added ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void *pointer) {
    pthread_mutex_lock(&lock);
    size_t size = remove_region(pointer, PINNED);
    pthread_mutex_unlock(&lock);
    return stub_error(size ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) ANSWER(device, host)

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                     const void *pointer) {
    enum place place = place_of(pointer);

    memset(attributes, 0, sizeof *attributes);
    attributes->type = place == DEVICE   ? cudaMemoryTypeDevice
                       : place == PINNED ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
    attributes->devicePointer = place == PAGEABLE ? NULL : (void *)pointer;
    attributes->hostPointer = place == DEVICE ? NULL : (void *)pointer;
    return cudaSuccess;
}

/* Bytes move at once, in the order of calls: as if each stream had nothing else to do. */
static cudaError_t copy(void *to, const void *from, size_t size, const char *call,
                        cudaStream_t stream) {
    enum place target = place_of(to), source = place_of(from);
    int to_device = target == DEVICE, from_device = source == DEVICE;
    const char *kind = to_device ? (from_device ? "D2D" : "H2D") : (from_device ? "D2H" : "H2H");
    int pinned = (to_device || target == PINNED) && (from_device || source == PINNED);

    stub_record_with_source("copy", stream, "%s\t%zu\t%s\t%d", kind, size, call, pinned);
    if (size <= (to_device && from_device ? MAX_COPY_ON_DEVICE : MAX_COPY))
        memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return copy(to, from, size, "blocking", NULL);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy(to, from, size, "async", stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t size, cudaStream_t stream) {
    return copy(to, from, size, "async", stream);
}

/* Zeros whole pages by giving them back; only the ends are written. */
static void clear(char *start, size_t size) {
    char *first = (char *)(((uintptr_t)start + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
    char *last = (char *)(((uintptr_t)start + size) & ~(uintptr_t)(PAGE - 1));
    if (first >= last) {
        memset(start, 0, size);
        return;
    }

    memset(start, 0, first - start);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, start + size - last);
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
    stub_record("memset", stream, "%zu\t%d", size, value);
    if (value == 0)
        clear(pointer, size);
    else if (size <= MAX_COPY)
        memset(pointer, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *pointer, int value, size_t size) {
    return cudaMemsetAsync(pointer, value, size, NULL);
}
