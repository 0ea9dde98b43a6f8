// Count seeks and flushes of FFmpeg in a process that preloads this library. The functions are found in the FFmpeg that torchcodec
// has loaded, which is not in the global scope.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <string.h>

long flushes, seeks;

static int find(struct dl_phdr_info *library, size_t size, void *name) {
    if (!strstr(library->dlpi_name, *(const char **)name))
        return 0;
    *(const char **)name = library->dlpi_name;
    return 1;
}

static void *loaded(const char *library, const char *function) {
    return dl_iterate_phdr(find, &library) ? dlsym(dlopen(library, RTLD_LAZY | RTLD_NOLOAD), function) : 0;
}

void avcodec_flush_buffers(void *codec) {
    flushes++;
    ((void (*)(void *))loaded("libavcodec.so", "avcodec_flush_buffers"))(codec);
}

int avformat_seek_file(void *format, int stream, int64_t least, int64_t time, int64_t most, int flags) {
    seeks++;
    return ((int (*)(void *, int, int64_t, int64_t, int64_t, int))loaded("libavformat.so", "avformat_seek_file"))(
        format, stream, least, time, most, flags);
}
