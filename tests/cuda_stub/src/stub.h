/*
 * What the parts of the stub share: the record, errors, the imaginary device's limits, streams.
 *
 * The stub takes the place of the CUDA runtime, the driver, cuBLAS and cuDNN. It keeps a record of
 * what it is asked to do and computes nothing.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* The device: an H200, as torch, Triton and the attention kernels' launchers ask about it. */
#define DEVICE_NAME "NVIDIA H200 (stub)"
#define DEVICE_MEMORY 150754820096ull /* bytes; CUDA_STUB_MEMORY overrides it */
#define COMPUTE_MAJOR 9
#define COMPUTE_MINOR 0
#define MULTIPROCESSORS 132
#define WARP 32
#define MAX_THREADS_PER_BLOCK 1024
#define MAX_BLOCK_Z 64
#define MAX_THREADS_PER_MULTIPROCESSOR 2048
#define MAX_BLOCKS_PER_MULTIPROCESSOR 32
#define MAX_GRID_X 2147483647u
#define MAX_GRID_YZ 65535u
#define REGISTERS 65536
#define SHARED_PER_BLOCK 49152
#define SHARED_PER_BLOCK_OPTIN 232448
#define SHARED_PER_MULTIPROCESSOR 233472
#define L2_BYTES 62914560
#define BUS_BITS 6144
#define CLOCK_KHZ 1980000
#define MEMORY_CLOCK_KHZ 3201000
#define DNN_VERSION 90100 /* cuDNN's */

/* The body of a function that only answers. Success is 0 in all libraries. */
#define ANSWER(place, value)                                                                       \
    {                                                                                              \
        *(place) = (value);                                                                        \
        return 0;                                                                                  \
    }

/* record.c: one line per call, columns separated by tabs. */
void stub_record(const char *kind, const void *stream, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same, with the line of Python that is running as its last column. */
void stub_record_with_source(const char *kind, const void *stream, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A call that the stub does not implement: it is recorded and reported, and fails with `status`. */
int stub_unknown(const char *name, int status);

/* streams.c */
long stub_stream_id(const void *stream);

/* memory.c */
unsigned long long stub_total_memory(void);

/* launch.c: the checks and the record that runtime and driver launches share; 0 if it may run. */
struct stub_launch {
    const char *name;
    unsigned grid[3], block[3];
    size_t shared;
    const void *stream;
};
int stub_launch(const struct stub_launch *launch);
