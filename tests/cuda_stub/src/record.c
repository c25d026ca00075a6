/*
 * The record: a file of lines `kind TAB phase TAB stream TAB columns...`.
 *
 * Python opens it, names the phase, and lends a function that finds the line of Python which is
 * running. Nothing is written while no file is open.
 */
#define _GNU_SOURCE
#include "stub.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;
static char phase[128];
static void (*find_source)(char *text, int size);

void stub_open(const char *path) {
    pthread_mutex_lock(&lock);
    if (file)
        fclose(file);
    file = path && *path ? fopen(path, "w") : NULL;
    pthread_mutex_unlock(&lock);
}

void stub_flush(void) {
    pthread_mutex_lock(&lock);
    if (file)
        fflush(file);
    pthread_mutex_unlock(&lock);
}

void stub_set_phase(const char *name) {
    pthread_mutex_lock(&lock);
    snprintf(phase, sizeof phase, "%s", name);
    pthread_mutex_unlock(&lock);
}

/* `function` takes the GIL, so nothing here calls it with a lock held. NULL ends the lending. */
void stub_set_source(void (*function)(char *, int)) { find_source = function; }

static void write_line(const char *kind, const void *stream, const char *format, va_list values,
                       const char *source) {
    pthread_mutex_lock(&lock);
    if (file) {
        fprintf(file, "%s\t%s\t%ld\t", kind, phase, stub_stream_id(stream));
        vfprintf(file, format, values);
        fprintf(file, source ? "\t%s\n" : "\n", source);
    }
    pthread_mutex_unlock(&lock);
}

void stub_record(const char *kind, const void *stream, const char *format, ...) {
    va_list values;
    va_start(values, format);
    write_line(kind, stream, format, values, NULL);
    va_end(values);
}

static void source_of_caller(char *text, int size) {
    text[0] = 0;
    if (file && find_source)
        find_source(text, size);
}

void stub_record_with_source(const char *kind, const void *stream, const char *format, ...) {
    char source[512];
    source_of_caller(source, sizeof source);

    va_list values;
    va_start(values, format);
    write_line(kind, stream, format, values, source);
    va_end(values);
}

int stub_unknown(const char *name, int status) {
    char source[512];
    source_of_caller(source, sizeof source);

    /* Also on stderr: a library may abort, or hide the failure, before Python reads the record. */
    fprintf(stderr, "cuda_stub: %s is not implemented (called at %s)\n", name, source);
    stub_record("unknown", NULL, "%s\t%s", name, source);
    stub_flush();
    return status;
}
